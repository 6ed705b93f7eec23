"""Measurements of `mlx-paged bench media`: tables of images and videos, and summary figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mlx_paged.bench.media_engines import CACHES, Ask, Reply
from mlx_paged.bench.results import table

_QUESTIONS = (
    "What is in this picture?",
    "How many shapes are there?",
    "What color is the largest shape?",
    "Which shapes are there?",
    "Is there a circle?",
    "Is there a square?",
    "What color is the background?",
    "How many colors are there?",
)
PAGED, VLM = "mlx-paged", "mlx-vlm"
TARGETS = {"eight_questions": 4.0, "second_turn": 0.15, "text": 0.95, "first_turn": 1.1}


class Engine(Protocol):
    """An engine, in this process or another, called by method name."""

    def ask(self, method: str, *args: Any, **options: Any) -> Any:
        """See `Remote.ask`."""


# --- Images ---------------------------------------------------------------------------------------


class Pictures:
    """Writes new images, and videos of them, to files. No two are equal.

    Args:
        folder: Directory for the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def image(self, size: int) -> str:
        """Writes a ``size x size`` PNG of colored shapes, which the embedded model knows."""
        path = self._next("png")
        self._draw(size).save(path)
        return path

    def video(self, size: int, num_frames: int) -> str:
        """Writes frames as an array to a file."""
        path = self._next("npy")
        np.save(path, np.stack([np.asarray(self._draw(size)) for _ in range(num_frames)]))
        return path

    def _next(self, suffix: str) -> str:
        self._count += 1
        return str(self._folder / f"{self._count}.{suffix}")

    def _draw(self, size: int) -> Any:
        from PIL import Image

        from mlx_paged.demo.pictures import Shape, draw

        self._count += 1
        rng = np.random.default_rng(self._count)
        colors = ("red", "green", "blue", "purple")
        shapes = tuple(
            Shape(
                str(rng.choice(["circle", "square", "triangle"])),
                str(rng.choice(colors)),
                0.25 + 0.5 * (i % 2),
                0.25 + 0.5 * (i // 2),
                0.15,
            )
            for i in range(int(rng.integers(1, 5)))
        )
        picture = draw(shapes).resize((size, size), Image.Resampling.NEAREST)
        # A dot distinguishes images with the same shapes.
        picture.putpixel((0, 0), tuple(int(v) for v in rng.integers(0, 256, 3)))
        return picture


@dataclass(frozen=True)
class Settings:
    """The questions and the number of rounds.

    Attributes:
        output_len: Tokens per answer.
        rounds: Counted rounds of each measurement; one warm-up round comes first.
        answer: The answer of a chat's first turn, in place of the model's: texts from random
            weights do not encode back to the same tokens.
    """

    output_len: int
    rounds: int
    answer: str | None = None


# --- Tables ---------------------------------------------------------------------------------------


def picture_rows(
    engines: Mapping[str, Engine], pictures: Pictures, sizes: Sequence[int], settings: Settings
) -> list[dict[str, Any]]:
    """One row for each image size, engine, and choice of caches."""
    found = []
    for size in sizes:

        def make(size: int = size) -> Ask:
            return Ask((_QUESTIONS[0],), images=(pictures.image(size),))

        found += _rows(engines, make, {"size": size}, settings)
    return found


def video_rows(
    engines: Mapping[str, Engine],
    pictures: Pictures,
    size: int,
    frames: Sequence[int],
    settings: Settings,
    *,
    takes_videos: bool,
) -> list[dict[str, Any]]:
    """One row for each number of frames, engine, and choice of caches.

    Args:
        takes_videos: True if the model takes videos; otherwise it gets the frames as images.
    """
    found = []
    for count in frames:

        def make(count: int = count) -> Ask:
            if takes_videos:
                return Ask((_QUESTIONS[0],), video=pictures.video(size, count))
            images = tuple(pictures.image(size) for _ in range(count))
            return Ask((_QUESTIONS[0],), images=images)

        load = {"frames": count, "size": size, "as_video": takes_videos}
        found += _rows(engines, make, load, settings)
    return found


def _rows(
    engines: Mapping[str, Engine],
    make: Callable[[], Ask],
    load: Mapping[str, Any],
    settings: Settings,
) -> list[dict[str, Any]]:
    """Asks each engine about new media, then asks another question about the same media."""
    cases = [(PAGED, caches) for caches in CACHES]
    if VLM in engines:
        cases += [(VLM, caches) for caches in engines[VLM].ask("caches")]
    seen: dict[tuple[str, str], list[tuple[Reply, Reply]]] = {case: [] for case in cases}
    failed: dict[tuple[str, str], str] = {}
    for turn in range(settings.rounds + 1):
        for case in cases if turn % 2 == 0 else cases[::-1]:
            name, caches = case
            new = _with_prompt(engines, make())
            other = _with_prompt(engines, replace(new, texts=(_QUESTIONS[1],)))
            if case in failed:
                continue
            try:
                pair = [
                    engines[name].ask("answer", ask, settings.output_len, caches)
                    for ask in (new, other)
                ]
            except Exception as error:  # mlx-vlm's caches do not work with every model family.
                failed[case] = str(error)[:300]
                continue
            if turn:
                seen[case].append((pair[0], pair[1]))
    return [
        {**load, "engine": name, "caches": caches}
        | (
            {"error": failed[name, caches]}
            if (name, caches) in failed
            else _figures_of(seen[name, caches])
        )
        for name, caches in cases
    ]


def _with_prompt(engines: Mapping[str, Engine], ask: Ask) -> Ask:
    return replace(ask, prompt=engines[PAGED].ask("prompt_of", ask))


def _figures_of(pairs: Sequence[tuple[Reply, Reply]]) -> dict[str, Any]:
    """Medians over rounds."""
    first, again = zip(*pairs)
    rates = [reply.rate for reply in first + again if reply.rate is not None]
    return {
        "prompt_tokens": max(reply.num_prompt_tokens for reply in first) or None,
        "ttft_ms": 1e3 * statistics.median(reply.ttft for reply in first),
        "ttft_again_ms": 1e3 * statistics.median(reply.ttft for reply in again),
        "tokens_per_second": statistics.median(rates) if rates else None,
        "peak_bytes": max(reply.peak_bytes for reply in first + again) or None,
        "pool_bytes": max(reply.pool_bytes for reply in first + again),
        "towers_run": sum(reply.num_encoded or 0 for reply in first),
        "towers_run_again": sum(reply.num_encoded or 0 for reply in again),
        "samples": {
            "ttft_ms": [1e3 * reply.ttft for reply in first],
            "ttft_again_ms": [1e3 * reply.ttft for reply in again],
        },
    }


def server_rows(
    servers: Mapping[str, Any], pictures: Pictures, sizes: Sequence[int], settings: Settings
) -> list[dict[str, Any]]:
    """The same measurement on servers, whose clients see text chunks."""
    found = []
    for size in sizes:
        seen: dict[str, list[tuple[Reply, Reply]]] = {name: [] for name in servers}
        for turn in range(settings.rounds + 1):
            for name in list(servers) if turn % 2 == 0 else list(servers)[::-1]:
                new = Ask((_QUESTIONS[0],), images=(pictures.image(size),))
                pair = [
                    servers[name].answer(ask, settings.output_len)
                    for ask in (new, replace(new, texts=(_QUESTIONS[1],)))
                ]
                if turn:
                    seen[name].append((pair[0], pair[1]))
        found += [
            {"size": size, "engine": f"{name} server", "caches": "its own"}
            | _figures_of(seen[name])
            for name in servers
        ]
    return found


# --- Figures --------------------------------------------------------------------------------------


def figures(
    engines: Mapping[str, Engine], pictures: Pictures, size: int, settings: Settings, rows: int
) -> dict[str, Any]:
    """Measures eight questions about one image, a second chat turn, and the cost to text requests.

    Args:
        rows: Number of texts that decode at once.
    """
    tokens = settings.output_len
    found: dict[str, Any] = {"size": size, "targets": TARGETS}
    found["eight_questions"] = _eight_questions(engines, pictures, size, settings)
    found["second_turn"] = _second_turn(engines, pictures, size, settings)
    ours = engines[PAGED]
    found["text_alone"] = ours.ask("text_speed", settings.rounds, rows, 2 * tokens)
    asks = [
        Ask((_QUESTIONS[0],), images=(pictures.image(size),))
        for _ in range(2 * (settings.rounds + 1))
    ]
    num_tokens = ours.ask("num_tokens", asks[-1])
    found["text_beside"] = ours.ask("beside", asks, num_tokens, settings.rounds, rows, 4 * tokens)
    return found


def _eight_questions(
    engines: Mapping[str, Engine], pictures: Pictures, size: int, settings: Settings
) -> dict[str, Any]:
    cases = [(PAGED, "all")]
    if VLM in engines:
        cases += [(VLM, caches) for caches in engines[VLM].ask("caches")]
    seconds: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    encoded, same, compared = [], 0, 0
    for turn in range(settings.rounds + 1):
        answers: dict[tuple[str, str], list[list[int]]] = {}
        image = pictures.image(size)
        asks = [_with_prompt(engines, Ask((q,), images=(image,))) for q in _QUESTIONS]
        for case in cases if turn % 2 == 0 else cases[::-1]:
            replies = engines[case[0]].ask("answer_all", asks, settings.output_len, case[1])
            answers[case] = [reply.token_ids for reply in replies]
            if turn:
                seconds[case].append(max(reply.times[-1] for reply in replies))
                if case[0] == PAGED:
                    encoded.append(replies[0].num_encoded or 0)
        if (VLM, "none") in answers and turn:
            pairs = zip(answers[PAGED, "all"], answers[VLM, "none"])
            same += sum(a == b for a, b in pairs)
            compared += len(asks)
    ours = seconds.pop((PAGED, "all"))
    return {
        "questions": len(_QUESTIONS),
        "output_len": settings.output_len,
        "towers_run": max(encoded),
        "seconds": statistics.median(ours),
        "same_answers": same,
        "num_answers": compared,
        "against": {
            f"{name}, caches: {caches}": {
                "seconds": statistics.median(theirs),
                "ratio": statistics.median(b / a for a, b in zip(ours, theirs)),
                "ratios": [b / a for a, b in zip(ours, theirs)],
            }
            for (name, caches), theirs in seconds.items()
        },
    }


def _second_turn(
    engines: Mapping[str, Engine], pictures: Pictures, size: int, settings: Settings
) -> dict[str, Any]:
    """Time to first token of both turns of a chat about a new image."""
    names = [name for name in (PAGED, VLM) if name in engines]
    caches = {PAGED: "all", VLM: "none"}
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    encoded = 0
    for turn in range(settings.rounds + 1):
        for name in names if turn % 2 == 0 else names[::-1]:
            first = _with_prompt(engines, Ask((_QUESTIONS[0],), images=(pictures.image(size),)))
            reply = engines[name].ask("answer", first, settings.output_len, caches[name])
            said = settings.answer or reply.text.strip() or "Shapes."
            texts = (*first.texts, said, _QUESTIONS[1])
            second = _with_prompt(engines, replace(first, texts=texts))
            again = engines[name].ask("answer", second, settings.output_len, caches[name])
            if turn:
                seen[name].append((reply.ttft, again.ttft))
                if name == PAGED:
                    encoded += again.num_encoded
    found: dict[str, Any] = {"towers_run_in_second_turns": encoded}
    for name, pairs in seen.items():
        shares = [b / a for a, b in pairs]
        found[name] = {
            "first_ttft_ms": 1e3 * statistics.median(a for a, _ in pairs),
            "second_ttft_ms": 1e3 * statistics.median(b for _, b in pairs),
            "share": statistics.median(shares),
            "shares": shares,
        }
    if VLM in seen:
        ratios = [a / b for (a, _), (b, _) in zip(seen[PAGED], seen[VLM])]
        found["first_turn_ratio"] = statistics.median(ratios)
        found["first_turn_ratios"] = ratios
    return found


# --- Report ---------------------------------------------------------------------------------------


def rows_text(rows: Sequence[Mapping[str, Any]], load: str, title: str) -> str:
    """Prints a table of images or videos."""
    body = []
    for row in rows:
        cells = [str(row[load]), row["engine"], row["caches"]]
        if "error" in row:
            body.append([*cells, f"failed: {row['error'][:60]}"])
            continue
        body.append(
            [
                *cells,
                _number(row["ttft_ms"], 1),
                _number(row["ttft_again_ms"], 1),
                _number(row["tokens_per_second"], 1),
                _number(None if row["peak_bytes"] is None else row["peak_bytes"] / 2**20, 0),
                _number(row["pool_bytes"] / 2**20, 0) if row["pool_bytes"] else "",
            ]
        )
    width = max(len(cells) for cells in body)
    header = [
        load,
        "engine",
        "caches",
        "TTFT ms",
        "again ms",
        "tokens/s",
        "peak MiB",
        "of it pools",
    ]
    header = header[:width]
    body = [cells + [""] * (width - len(cells)) for cells in body]
    return f"{title}\n{table(header, body)}"


def figures_text(found: Mapping[str, Any]) -> str:
    """Prints one line per figure, with its target."""
    eight, second = found["eight_questions"], found["second_turn"]
    lines = [f"Figures, pictures of {found['size']} x {found['size']}"]
    lines.append(
        f"  {eight['questions']} questions about one picture at once: {eight['seconds']:.2f} s, "
        f"the tower ran {eight['towers_run']} times"
    )
    for name, other in eight["against"].items():
        wanted = f" (wanted: {TARGETS['eight_questions']:g})" if "none" in name else ""
        lines.append(
            f"    {name}, one by one: {other['seconds']:.2f} s, {other['ratio']:.2f}x{wanted}"
        )
    if eight["num_answers"]:
        lines.append(f"    {eight['same_answers']} of {eight['num_answers']} answers are the same")
    for name in (PAGED, VLM):
        if name in second:
            turn = second[name]
            wanted = f" (wanted: {TARGETS['second_turn']:.0%})" if name == PAGED else ""
            lines.append(
                f"  second turn, {name}: TTFT {turn['second_ttft_ms']:.0f} ms after "
                f"{turn['first_ttft_ms']:.0f} ms, {turn['share']:.1%}{wanted}"
            )
    if "first_turn_ratio" in second:
        lines.append(
            f"  first turn: TTFT {second['first_turn_ratio']:.2f} of mlx-vlm's (wanted: "
            f"{TARGETS['first_turn']:g})"
        )
    text, beside = found["text_alone"], found["text_beside"]
    if text["ratio"] is not None:
        lines.append(
            f"  {text['rows']} texts: {text['with_media']:.0f} tokens/s, {text['ratio']:.1%} of "
            f"{text['text_model']:.0f} of the text model (wanted: {TARGETS['text']:.0%})"
        )
    for kind in ("alone", "beside_texts", "beside_known_pictures", "beside_pictures"):
        each = beside[kind]
        lines.append(
            f"    {kind.replace('_', ' ')}: {each['tokens_per_second']:.0f} tokens/s, largest gap "
            f"{each['largest_gap_ms']:.0f} ms"
        )
    lines.append(
        f"    beside pictures {beside['ratio']:.1%} of beside texts of as many tokens, beside "
        f"known ones {beside['ratio_known']:.1%}"
    )
    return "\n".join(lines)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
