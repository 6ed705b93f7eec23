"""Contents of pictures: shapes or characters with color, place and size, sampled from a seed."""

from __future__ import annotations

import math
import string
from dataclasses import dataclass, field
from random import Random

KINDS = ("circle", "square", "triangle", "star", "heart", "cross", "moon")
CHARACTERS = string.digits + string.ascii_uppercase
RGB = tuple[int, int, int]
COLORS: dict[str, tuple[RGB, ...]] = {
    "red": ((255, 0, 0), (225, 30, 35), (205, 15, 35)),
    "orange": ((255, 165, 0), (255, 128, 0), (240, 120, 20)),
    "yellow": ((255, 255, 0), (255, 220, 0), (240, 210, 40)),
    "green": ((0, 128, 0), (0, 200, 0), (0, 255, 0), (40, 160, 70), (34, 139, 34)),
    "blue": ((0, 0, 255), (30, 100, 230), (30, 144, 255), (20, 40, 150)),
    "purple": ((128, 0, 128), (150, 50, 200), (110, 30, 160), (138, 43, 226)),
    "pink": ((255, 192, 203), (255, 105, 180), (255, 150, 190), (250, 90, 160)),
    "brown": ((139, 69, 19), (120, 70, 40), (150, 90, 50), (110, 55, 25)),
    "black": ((0, 0, 0), (25, 25, 25)),
    "white": ((255, 255, 255), (245, 245, 245)),
    "gray": ((128, 128, 128), (160, 160, 160), (105, 105, 105)),
}
NAMES = tuple(COLORS)
JITTER = 12
CONTRAST = 95.0  # minimum distance of a shape's color from the background's
MAX_OBJECTS = 9
SIDE = 128  # pixels; the model's processor resizes every picture to such a square


@dataclass(frozen=True)
class Thing:
    """One shape or character; places and sizes are fractions of the picture's longer side."""

    kind: str  # in KINDS or CHARACTERS
    color: str
    rgb: RGB
    x: float
    y: float
    radius: float
    angle: float  # radians
    style: float  # 0 to 1: selects the variant of a shape or the font of a character


@dataclass
class Scene:
    """A picture's content."""

    width: float  # the longer of width and height is 1
    height: float
    background: str | None  # name of a color, or None if there is no single one
    shades: tuple[RGB, RGB]  # background colors at the two ends of the gradient
    direction: float  # of the gradient, in radians
    things: list[Thing] = field(default_factory=list)
    text: str = ""  # the characters as a string, if the picture shows writing

    def groups(self) -> list[tuple[int, str, str]]:
        """Returns (count, color, kind) of equal things, by descending count, then by name."""
        counts: dict[tuple[str, str], int] = {}
        for thing in self.things:
            key = (thing.color, thing.kind)
            counts[key] = counts.get(key, 0) + 1
        rows = [(count, color, kind) for (color, kind), count in counts.items()]
        return sorted(
            rows, key=lambda g: (-g[0], (*KINDS, *CHARACTERS).index(g[2]), NAMES.index(g[1]))
        )


def shade(random: Random, name: str) -> RGB:
    """Returns a shade of a named color."""
    red, green, blue = (
        min(255, max(0, value + random.randint(-JITTER, JITTER)))
        for value in random.choice(COLORS[name])
    )
    return (red, green, blue)


def contrast(a: RGB, b: RGB) -> float:
    """Returns the distance of two colors, with weights close to human perception."""
    return math.sqrt(sum(w * (p - q) ** 2 for w, p, q in zip((0.9, 1.3, 0.8), a, b, strict=True)))


def _background(random: Random) -> tuple[str | None, tuple[RGB, RGB]]:
    draw = random.random()
    if draw < 0.85:
        if draw < 0.35:
            name, tone = "white", (255, 255, 255)
        else:
            name = random.choices(NAMES, [1, 1, 1, 1, 2, 1, 1, 1, 4, 5, 3])[0]
            tone = shade(random, name)
        return name, (tone, tone)
    first = tuple(random.randint(0, 255) for _ in range(3))
    second = tuple(min(255, max(0, v + random.randint(-45, 45))) for v in first)
    return None, (first, second)  # type: ignore[return-value]


def _stands_out(rgb: RGB, scene: Scene) -> bool:
    return all(contrast(rgb, tone) >= CONTRAST for tone in scene.shades)


def _tone(random: Random, scene: Scene, name: str | None = None) -> tuple[str, RGB]:
    """Returns a color (of that name, if given) that stands out from the background."""
    for _ in range(40):
        chosen = name or random.choice(NAMES)
        rgb = shade(random, chosen)
        if chosen != scene.background and _stands_out(rgb, scene):
            return chosen, rgb
    if name is not None:
        return _tone(random, scene)
    dark = sum(sum(tone) for tone in scene.shades) < 765
    return ("white", (255, 255, 255)) if dark else ("black", (0, 0, 0))


def _angle(random: Random, kind: str) -> float:
    if random.random() < 0.4:
        return 0.0
    if kind in ("star", "triangle", "moon", "circle"):
        return random.uniform(-math.pi, math.pi)
    return random.uniform(-0.4, 0.4) if kind != "square" else random.uniform(-0.6, 0.6)


def _places(random: Random, scene: Scene, count: int) -> list[tuple[float, float, float]]:
    """Returns x, y and radius of objects that hardly overlap."""
    area = scene.width * scene.height
    top = min(0.36 * min(scene.width, scene.height), 0.52 * math.sqrt(area / count) * 0.85)
    low = max(0.064, 0.3 * top)
    if count > 1 and random.random() < 0.2:  # in one row or two
        rows = 1 if count <= 5 else 2
        columns = math.ceil(count / rows)
        pitch = scene.width / columns
        radius = min(0.42 * pitch, 0.42 * scene.height / rows) * random.uniform(0.75, 1.0)
        if radius >= 0.06:
            cells = [(i // columns, i % columns) for i in range(count)]
            lift = random.uniform(-0.5, 0.5) * max(0.0, scene.height / rows - 2.2 * radius)
            return [
                (
                    pitch * (column + 0.5),
                    scene.height / rows * (row + 0.5) + lift,
                    radius * random.uniform(0.9, 1.0),
                )
                for row, column in cells
            ]
    same = random.uniform(low, top) if random.random() < 0.5 else None
    gap = random.choice((1.02, 1.02, 1.1, 0.92))
    placed: list[tuple[float, float, float]] = []
    tries = 0
    while len(placed) < count:
        tries += 1
        shrink = 0.985 ** max(0, tries - 20)
        radius = max(0.06, (same or random.uniform(low, top)) * shrink)
        x = random.uniform(radius * 1.02, scene.width - radius * 1.02)
        y = random.uniform(radius * 1.02, scene.height - radius * 1.02)
        if all(math.hypot(x - a, y - b) >= gap * (radius + r) for a, b, r in placed):
            placed.append((x, y, radius))
        elif tries > 400:
            placed, tries, gap = [], 0, gap * 0.93
    return placed


def _shape_groups(random: Random) -> list[tuple[int, str, str | None]]:
    """Returns (count, kind, color or None) for each group of a picture."""
    draw = random.random()
    if draw < 0.42:
        count = random.randint(1, 5) if random.random() < 0.85 else random.randint(6, MAX_OBJECTS)
        return [(count, random.choice(KINDS), None)]
    if draw < 0.52:  # many single things, for questions about the total
        count = random.randint(3, 6)
        return [(1, random.choice(KINDS), None) for _ in range(count)]
    if draw < 0.64:  # two things, for questions about place and identity
        first, second = random.sample(KINDS, 2)
        return [(1, first, None), (1, second, None)]
    groups = random.choice((2, 2, 3))
    same_kind = random.choice(KINDS) if random.random() < 0.25 else None
    same_color = random.choice(NAMES) if random.random() < 0.2 else None
    counts = [random.randint(1, 5 if groups == 2 else 3) for _ in range(groups)]
    while sum(counts) > MAX_OBJECTS:
        counts[counts.index(max(counts))] -= 1
    return [(count, same_kind or random.choice(KINDS), same_color) for count in counts]


def _write(random: Random, scene: Scene) -> None:
    """Puts a string of one to four characters on the picture."""
    draw = random.random()
    if draw < 0.3:
        text = random.choice(string.digits)
    elif draw < 0.55:
        text = random.choice(string.ascii_uppercase)
    else:
        letters = string.digits if draw < 0.8 else string.ascii_uppercase
        text = "".join(random.choice(letters) for _ in range(random.randint(2, 4)))
    scene.text = text
    color, rgb = _tone(random, scene)
    # A character's box is as high as two radii and about 0.75 as wide.
    advance = random.uniform(1.35, 1.7)
    top = min(0.45 * scene.height, 0.94 * scene.width / (advance * (len(text) - 1) + 1.8))
    radius = random.uniform(max(0.1, 0.45 * top), top) if top > 0.1 else top
    span = radius * (advance * (len(text) - 1) + 1.8)
    left = random.uniform(0, max(0.0, scene.width - span)) + 0.9 * radius
    y = random.uniform(radius, max(radius, scene.height - radius))
    angle = random.uniform(-0.12, 0.12) if random.random() < 0.5 else 0.0
    style = random.random()
    for index, character in enumerate(text):
        x = left + index * advance * radius
        scene.things.append(Thing(character, color, rgb, x, y, radius, angle, style))


def sample_scene(random: Random, writing: float = 0.22, mixed: float = 0.06) -> Scene:
    """Returns a random scene; `writing`, `mixed`: shares with only and with also characters."""
    width = height = 1.0
    if random.random() < 0.4:
        ratio = random.uniform(0.6, 1.0)
        width, height = (1.0, ratio) if random.random() < 0.65 else (ratio, 1.0)
    name, shades = _background(random)
    scene = Scene(width, height, name, shades, random.uniform(0, 2 * math.pi))
    draw = random.random()
    if draw < writing:
        _write(random, scene)
        return scene
    groups = _shape_groups(random)
    if draw < writing + mixed:
        groups = [*[g for g in groups if g[0] < 4][:2], (1, random.choice(CHARACTERS), None)]
    specs: list[tuple[str, str, RGB]] = []
    for count, kind, color in groups:
        chosen, rgb = _tone(random, scene, color)
        vary = random.random() < 0.15  # shades differ within a group
        for _ in range(count):
            other = shade(random, chosen) if vary else rgb
            specs.append((kind, chosen, other if _stands_out(other, scene) else rgb))
    specs = specs[:MAX_OBJECTS]
    random.shuffle(specs)
    places = _places(random, scene, len(specs))
    upright = random.random() < 0.4
    style = random.random() if random.random() < 0.6 else None
    for (kind, color, rgb), (x, y, radius) in zip(specs, places, strict=True):
        angle = 0.0 if upright or kind in CHARACTERS else _angle(random, kind)
        variant = random.random() if style is None else style
        scene.things.append(Thing(kind, color, rgb, x, y, radius, angle, variant))
    return scene
