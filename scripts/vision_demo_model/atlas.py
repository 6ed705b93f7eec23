"""Signed distance fields of every shape and character, to render pictures on any device.

A texel holds the distance to the outline in radii, negative inside. The textures cover
[-EXTENT, EXTENT] radii in both directions.
"""

from __future__ import annotations

import math
import multiprocessing
from pathlib import Path

import numpy as np

from .scenes import CHARACTERS, KINDS

SIZE, EXTENT = 72, 1.25
VARIANTS = 3  # per shape


def outline(kind: str, style: float) -> np.ndarray:
    """Returns the polygon [N, 2] of a shape of radius 1, y down; style (0 to 1) is its variant."""
    turn = 2 * math.pi
    if kind == "circle":
        return np.array([(math.cos(t), math.sin(t)) for t in np.linspace(0, turn, 64, False)])
    if kind == "square":
        side = 0.8
        return np.array([(-side, -side), (side, -side), (side, side), (-side, side)])
    if kind == "triangle":
        if style < 0.67:
            return np.array([(math.sin(t), -math.cos(t)) for t in (0, turn / 3, 2 * turn / 3)])
        return np.array([(0, -0.9), (0.85, 0.75), (-0.85, 0.75)])
    if kind == "star":
        inner = 0.382 + 0.14 * style
        steps = range(10)
        radii = [1.0 if i % 2 == 0 else inner for i in steps]
        return np.array(
            [
                (r * math.sin(turn * i / 10), -r * math.cos(turn * i / 10))
                for i, r in zip(steps, radii, strict=True)
            ]
        )
    if kind == "heart":
        deep = 0.9 + 0.15 * style
        points = []
        for t in np.linspace(0, turn, 64, False):
            x = 16 * math.sin(t) ** 3
            y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
            points.append((x / 17, -(y + 2.5) / 17 * deep))
        return np.array(points)
    if kind == "cross":
        arm = 0.24 + 0.14 * style
        a, b = 0.92, arm
        return np.array(
            [
                (-b, -a),
                (b, -a),
                (b, -b),
                (a, -b),
                (a, b),
                (b, b),
                (b, a),
                (-b, a),
                (-b, b),
                (-a, b),
                (-a, -b),
                (-b, -b),
            ]
        )
    if kind == "moon":
        shift, inner = 0.42 + 0.12 * style, 0.85
        # Intersections of the two circles; the outer arc is the long one, the inner arc returns.
        x = (1 - inner**2 + shift**2) / (2 * shift)
        outer_angle = math.acos(x)
        inner_angle = math.acos((x - shift) / inner)
        outer = np.linspace(outer_angle, turn - outer_angle, 48)
        back = np.linspace(turn - inner_angle, inner_angle, 40)[1:-1]
        arc = [(math.cos(t), math.sin(t)) for t in outer]
        hollow = [(shift + inner * math.cos(t), inner * math.sin(t)) for t in back]
        return np.array(arc + hollow)
    raise ValueError(f"[outline] kind must be one of {', '.join(KINDS)}, got {kind!r}")


def _grid() -> np.ndarray:
    axis = ((np.arange(SIZE) + 0.5) / SIZE * 2 - 1) * EXTENT
    return np.stack(np.meshgrid(axis, axis), axis=-1)  # [SIZE, SIZE, (x, y)]


def polygon_distance(points: np.ndarray) -> np.ndarray:
    """Returns signed distances [SIZE, SIZE] to a polygon."""
    at = _grid()[:, :, None]
    start, end = points, np.roll(points, -1, axis=0)
    along = end - start
    share = ((at - start) * along).sum(-1) / (along**2).sum(-1)
    nearest = start + np.clip(share, 0, 1)[..., None] * along
    distance = np.sqrt(((at - nearest) ** 2).sum(-1)).min(-1)
    above = (start[:, 1] > at[..., 1]) != (end[:, 1] > at[..., 1])
    with np.errstate(divide="ignore", invalid="ignore"):
        x = start[:, 0] + (at[..., 1] - start[:, 1]) * along[:, 0] / along[:, 1]
    inside = (above & (at[..., 0] < x)).sum(-1) % 2 == 1
    return np.where(inside, -distance, distance)


def fonts() -> list[str | None]:
    """Returns the font files of the characters; None is Pillow's own font."""
    from importlib.util import find_spec

    spec = find_spec("matplotlib")  # for its fonts only
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("[fonts] matplotlib is not installed; its fonts are needed")
    folder = Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf"
    names = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSansMono")
    more = ("DejaVuSansMono-Bold", "STIXGeneral", "STIXGeneralBol", "cmss10", "cmb10")
    return [None, None, *(str(folder / f"{name}.ttf") for name in (*names, *more))]


def glyph_distance(character: str, font: str | None) -> np.ndarray:
    """Returns signed distances [SIZE, SIZE] to a character, centered in a box 2 radii high."""
    from PIL import Image, ImageDraw, ImageFont

    resolution = SIZE * 4
    unit = resolution / (2 * EXTENT)  # pixels per radius
    size = 2.0 * unit
    face = ImageFont.load_default(size * 1.2) if font is None else ImageFont.truetype(font, size)
    image = Image.new("L", (resolution, resolution), 0)
    draw = ImageDraw.Draw(image)
    left, top, right, bottom = draw.textbbox((0, 0), character, font=face)
    # A second font size scales every capital and digit to the same height.
    face = face.font_variant(size=face.size * 1.8 * unit / (bottom - top))
    left, top, right, bottom = draw.textbbox((0, 0), character, font=face)
    place = (resolution / 2 - (left + right) / 2, resolution / 2 - (top + bottom) / 2)
    draw.text(place, character, fill=255, font=face)
    mask = np.array(image) > 127
    padded = np.pad(mask, 1)
    edge = mask & ~(padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:])
    ys, xs = np.nonzero(edge)
    points = (np.stack([xs, ys], -1) + 0.5) / resolution * 2 * EXTENT - EXTENT
    points = points[:: max(1, len(points) // 400)].astype(np.float32)
    at = _grid().reshape(-1, 2).astype(np.float32)
    squares = (at**2).sum(-1)[:, None] + (points**2).sum(-1) - 2 * at @ points.T
    distance = np.sqrt(np.maximum(squares.min(1), 0)).reshape(SIZE, SIZE)
    inside = mask.reshape(SIZE, 4, SIZE, 4).mean((1, 3)) > 0.5
    return np.where(inside, -distance, distance)


def _character(character: str) -> list[np.ndarray]:
    return [glyph_distance(character, face) for face in fonts()]


def make_atlas(workers: int) -> tuple[np.ndarray, int]:
    """Returns textures [N, SIZE, SIZE] float32 and the number of fonts.

    The order: every kind's variants, then every character's fonts.
    """
    textures = [
        polygon_distance(outline(kind, variant / (VARIANTS - 1)))
        for kind in KINDS
        for variant in range(VARIANTS)
    ]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        for made in pool.imap(_character, CHARACTERS):
            textures += made
    return np.stack(textures).astype(np.float32), len(fonts())


def index(kind: str, style: float, fonts: int) -> int:
    """Returns the index of an object's texture."""
    if kind in KINDS:
        return KINDS.index(kind) * VARIANTS + min(VARIANTS - 1, int(style * VARIANTS))
    return (
        len(KINDS) * VARIANTS + CHARACTERS.index(kind) * fonts + min(fonts - 1, int(style * fonts))
    )
