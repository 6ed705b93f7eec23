"""Packs chats about pictures into rows of tokens, with the pictures as arrays for the renderer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from random import Random

import numpy as np

from . import atlas
from .questions import SYSTEM_PROMPTS, Turn, ask, ask_two, blur_wording, chat
from .scenes import CHARACTERS, KINDS, MAX_OBJECTS, NAMES, Scene, sample_scene
from .tokenizer import END, FAKE, GLOBAL, IMAGE, IMAGE_TOKENS, PAD, START

LENGTH = 224
TURNS = 12
CELLS = 8  # cells of a picture in each direction; each is one token
TURN_KINDS = (
    "content",
    "describe",
    "count",
    "count above five",
    "color",
    "exists",
    "shape",
    "background",
    "place",
    "relation",
    "size",
    "more",
    "read",
    "two pictures",
    "chat",
)
ONCE = ("content", "describe", "background")  # a chat rarely asks these twice


@dataclass
class Batch:
    """R rows and their M pictures, in the order of the rows."""

    tokens: np.ndarray  # [R, LENGTH] int16
    turns: np.ndarray  # [R, LENGTH] int8: number (from 1) of the answer with this token, else 0
    kinds: np.ndarray  # [R, TURNS] int8: index into TURN_KINDS, or -1
    positions: np.ndarray  # [R, LENGTH] int16
    texture: np.ndarray  # [M, MAX_OBJECTS] int16
    places: np.ndarray  # [M, MAX_OBJECTS, 4] float32
    colors: np.ndarray  # [M, MAX_OBJECTS, 3] float32
    stretch: np.ndarray  # [M, 2] float32
    shades: np.ndarray  # [M, 2, 3] float32
    direction: np.ndarray  # [M] float32
    cell_kinds: np.ndarray  # [M, 64] int8: 0 for none, else 1 + index into KINDS and CHARACTERS
    cell_colors: np.ndarray  # [M, 64] int8

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def label(turn: Turn) -> int:
    """Returns the index of a turn's kind; counts above five share a kind of their own."""
    if turn.kind == "count" and any(
        w in turn.answer for w in ("six", "seven", "eight", "nine", *"6789")
    ):
        return TURN_KINDS.index("count above five")
    return TURN_KINDS.index(turn.kind)


class BatchMaker:
    """Makes batches from a seed."""

    def __init__(self, tokenizer_file: Path, fonts: int, seed: str) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.fonts = fonts
        self.random = Random(seed)
        self.encode = lru_cache(maxsize=200_000)(self._encode)
        ids = {t: self.tokenizer.token_to_id(t) for t in (PAD, START, END, FAKE, IMAGE, GLOBAL)}
        self.pad = ids[PAD]
        self.picture = [ids[FAKE], ids[GLOBAL], *[ids[IMAGE]] * IMAGE_TOKENS, ids[FAKE]]

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text).ids)

    def row(self, pictures: int) -> tuple[list[int], list[int], list[int], list[int], list[Scene]]:
        """Returns tokens, turn numbers, kinds, positions and scenes of one chat."""
        r = self.random
        ids: list[int] = []
        turns: list[int] = []
        kinds: list[int] = []
        positions: list[int] = []
        scenes = [sample_scene(r) for _ in range(pictures)]
        gaps = r.random() < 0.3
        at = 0

        def add(tokens: tuple[int, ...] | list[int], turn: int = 0) -> None:
            nonlocal at
            ids.extend(tokens)
            turns.extend([turn] * len(tokens))
            positions.extend(range(at, at + len(tokens)))
            at += len(tokens)

        if r.random() < 0.15:
            add(self.encode(f"{START}system\n{r.choice(SYSTEM_PROMPTS)}{END}\n"))
        together = pictures == 2 and r.random() < 0.7
        shown = 0
        said: set[tuple[str, str]] = set()
        for _ in range(40):
            if len(kinds) == TURNS:
                break
            new = 0
            if shown < pictures and (
                (shown == 0 and (r.random() > 0.04 or pictures == 2)) or len(kinds) > 0
            ):
                new = pictures if together else 1
            if pictures == 2 and shown == 1 and len(kinds) < 2 and r.random() < 0.5:
                new = 0
            seen = shown + new
            if seen == 0 or (not new and r.random() < 0.04):
                turn = chat(r, seen > 0)
            elif together:
                turn = ask_two(r, scenes[0], scenes[1])
            else:
                turn = ask(r, scenes[seen - 1])
            if (
                not together
                and turn.kind in ONCE
                and (turn.kind, turn.answer) in said
                and r.random() < 0.9
            ):
                continue
            said.add((turn.kind, turn.answer))
            question = blur_wording(r, turn.question)
            body = self.encode(question)
            answer = self.encode(turn.answer + END)
            needed = new * len(self.picture) + len(body) + len(answer) + 12
            left = (pictures - seen) * len(self.picture) + (60 if pictures > seen else 0)
            if len(ids) + needed + left > LENGTH:
                if shown < pictures:  # all pictures must appear
                    continue
                break
            if gaps and ids and r.random() < 0.5:
                at += r.randint(0, 150)
            add(self.encode(f"{START}user\n"))
            first = r.random() < 0.75
            for _ in range(new if first else 0):
                add(self.picture)
            add(body)
            for _ in range(0 if first else new):
                add(self.picture)
            add(self.encode(f"{END}\n{START}assistant\n"))
            kinds.append(label(turn))
            add(answer, len(kinds))
            add(self.encode("\n"))
            shown = seen
        if shown < pictures:  # they did not fit
            return self.row(pictures)
        return ids, turns, kinds, positions, scenes

    def batch(self, rows: int) -> Batch:
        """Returns a batch with as many pictures as rows; some rows have two, and as many none."""
        pairs = rows * 5 // 64
        wanted = [2] * pairs + [0] * pairs + [1] * (rows - 2 * pairs)
        self.random.shuffle(wanted)
        batch = Batch(
            tokens=np.full((rows, LENGTH), self.pad, np.int16),
            turns=np.zeros((rows, LENGTH), np.int8),
            kinds=np.full((rows, TURNS), -1, np.int8),
            positions=np.zeros((rows, LENGTH), np.int16),
            texture=np.full((rows, MAX_OBJECTS), -1, np.int16),
            places=np.ones((rows, MAX_OBJECTS, 4), np.float32),
            colors=np.zeros((rows, MAX_OBJECTS, 3), np.float32),
            stretch=np.ones((rows, 2), np.float32),
            shades=np.zeros((rows, 2, 3), np.float32),
            direction=np.zeros(rows, np.float32),
            cell_kinds=np.zeros((rows, CELLS * CELLS), np.int8),
            cell_colors=np.zeros((rows, CELLS * CELLS), np.int8),
        )
        picture = 0
        for index, pictures in enumerate(wanted):
            ids, turns, kinds, positions, scenes = self.row(pictures)
            batch.tokens[index, : len(ids)] = ids
            batch.turns[index, : len(ids)] = turns
            batch.kinds[index, : len(kinds)] = kinds
            batch.positions[index, : len(ids)] = positions
            for scene in scenes:
                self._put(batch, picture, scene)
                picture += 1
        return batch

    def _put(self, batch: Batch, at: int, scene: Scene) -> None:
        batch.stretch[at] = 1 / scene.width, 1 / scene.height
        batch.shades[at] = np.array(scene.shades, np.float32) / 255
        batch.direction[at] = scene.direction
        for index, thing in enumerate(scene.things):
            x, y = thing.x / scene.width, thing.y / scene.height
            batch.texture[at, index] = atlas.index(thing.kind, thing.style, self.fonts)
            batch.places[at, index] = x, y, thing.radius * 128, thing.angle
            batch.colors[at, index] = np.array(thing.rgb, np.float32) / 255
            cell = min(CELLS - 1, int(y * CELLS)) * CELLS + min(CELLS - 1, int(x * CELLS))
            batch.cell_kinds[at, cell] = 1 + (*KINDS, *CHARACTERS).index(thing.kind)
            batch.cell_colors[at, cell] = 1 + NAMES.index(thing.color)
