"""Procedurally drawn pictures for the embedded vision model, with questions and true answers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from PIL.Image import Image

Color = str | tuple[int, int, int]
SHAPES = ("circle", "square", "triangle", "star", "heart", "cross", "moon")


class Shape(NamedTuple):
    """A shape or a character; x, y and radius are fractions of the picture's width."""

    kind: str  # one of SHAPES, or a single character
    color: Color
    x: float
    y: float
    radius: float
    angle: float = 0.0  # radians, clockwise; characters stay upright


class Sample(NamedTuple):
    """A picture with a question about it and the true answer."""

    name: str
    shapes: tuple[Shape, ...]
    question: str
    answer: str
    background: Color = "white"


SAMPLES = (
    Sample(
        "circles",
        (
            Shape("circle", "red", 0.25, 0.3, 0.14),
            Shape("circle", "red", 0.7, 0.35, 0.17),
            Shape("circle", "red", 0.45, 0.75, 0.15),
        ),
        "What is in this picture?",
        "Three red circles.",
    ),
    Sample(
        "squares and a star",
        (
            Shape("square", "blue", 0.25, 0.27, 0.15),
            Shape("square", "blue", 0.74, 0.3, 0.17),
            Shape("star", "yellow", 0.5, 0.72, 0.2),
        ),
        "How many squares are there?",
        "There are two squares.",
        background="black",
    ),
    Sample(
        "digit",
        (Shape("7", "green", 0.5, 0.5, 0.32),),
        "Which digit is this?",
        "7.",
    ),
    Sample(
        "heart",
        (Shape("heart", "purple", 0.5, 0.5, 0.3),),
        "What color is the heart?",
        "Purple.",
    ),
)


def _corners(kind: str) -> list[tuple[float, float]]:
    """Vertices of a shape of radius 1, with y pointing down."""
    turn = 2 * math.pi
    if kind == "circle":
        return [(math.cos(turn * i / 96), math.sin(turn * i / 96)) for i in range(96)]
    if kind == "square":
        return [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)]
    if kind == "triangle":
        return [(math.sin(turn * i / 3), -math.cos(turn * i / 3)) for i in range(3)]
    if kind == "star":
        radii = (1.0, 0.42)
        angles = [turn * i / 10 for i in range(10)]
        return [
            (radii[i % 2] * math.sin(a), -radii[i % 2] * math.cos(a)) for i, a in enumerate(angles)
        ]
    if kind == "cross":
        a, b = 0.92, 0.3
        return [
            (-b, -a), (b, -a), (b, -b), (a, -b), (a, b), (b, b),
            (b, a), (-b, a), (-b, b), (-a, b), (-a, -b), (-b, -b),
        ]  # fmt: skip
    if kind == "heart":
        points = []
        for i in range(96):
            t = turn * i / 96
            y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
            points.append((16 * math.sin(t) ** 3 / 17, -(y + 2.5) / 17))
        return points
    # A crescent: the long arc of one circle, and back along an arc of another that cuts it.
    shift, inner = 0.48, 0.85
    meet = (1 - inner**2 + shift**2) / (2 * shift)
    outer_end, inner_end = math.acos(meet), math.acos((meet - shift) / inner)
    outer = [outer_end + (turn - 2 * outer_end) * i / 64 for i in range(65)]
    back = [turn - inner_end - (turn - 2 * inner_end) * i / 48 for i in range(1, 48)]
    hollow = [(shift + inner * math.cos(t), inner * math.sin(t)) for t in back]
    return [*((math.cos(t), math.sin(t)) for t in outer), *hollow]


def draw(
    shapes: tuple[Shape, ...] | list[Shape],
    background: Color = "white",
    width: int = 256,
    height: int | None = None,
) -> Image:
    """Returns a picture of the shapes, `width` by `height` pixels (square if `height` is None).

    Raises:
        ValueError: A kind that is neither a shape nor one character, or a size below 1.
    """
    from PIL import Image, ImageDraw, ImageFont

    height = width if height is None else height
    if width < 1 or height < 1:
        raise ValueError(f"[draw] width and height must be at least 1, got {width} and {height}")
    finer = 4  # Supersampling factor, because Pillow draws polygons with hard edges.
    image = Image.new("RGB", (width * finer, height * finer), background)
    painter = ImageDraw.Draw(image)
    for shape in shapes:
        x, y, radius = (value * width * finer for value in (shape.x, shape.y, shape.radius))
        c, s = math.cos(shape.angle), math.sin(shape.angle)
        if shape.kind in SHAPES:
            corners = [
                (x + radius * (u * c - v * s), y + radius * (u * s + v * c))
                for u, v in _corners(shape.kind)
            ]
            painter.polygon(corners, fill=shape.color)
        elif len(shape.kind) == 1:
            font = ImageFont.load_default(radius * 2.45)
            left, top, right, bottom = painter.textbbox((0, 0), shape.kind, font=font)
            place = (x - (left + right) / 2, y - (top + bottom) / 2)
            painter.text(place, shape.kind, fill=shape.color, font=font)
        else:
            raise ValueError(
                f"[draw] kind must be one of {', '.join(SHAPES)} or one character, "
                f"got {shape.kind!r}"
            )
    return image.resize((width, height), Image.Resampling.LANCZOS)
