"""Converts a collected corpus to training data: a tokenizer and compressed token files.

    python -m scripts.demo_model.prepare RAW_FOLDER OUT_FOLDER

OUT_FOLDER then holds `tokenizer/`, `code*.xz` (one stream of tokens), `held_out.json`,
`tasks.json.xz` and `statistics.json`.
"""

from __future__ import annotations

import json
import lzma
import random
import sys
from pathlib import Path
from typing import Any

from mlx_paged.demo.prompts import SYSTEM_PROMPT

from .compositions import random_compositions
from .families import all_families
from .tokenizer import END_OF_TEXT, train_tokenizer
from .wording import load_classics, phrase

HELD_OUT_LIMIT = 300
COMPOSITIONS, HELD_OUT_COMPOSITIONS = 12_000, 200


def tasks(pairs: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Returns the chat tasks of each kind as [asks, answer], training ones only."""
    kinds: dict[str, list[Any]] = {"classic": [[t.asks, t.answer] for t in load_classics()]}
    kinds["family"] = [[[p.description], p.source.strip()] for p in all_families()]
    compositions = random_compositions(COMPOSITIONS)[HELD_OUT_COMPOSITIONS:]
    kinds["composition"] = [[[p.description], p.source.strip()] for p in compositions]
    for kind in ("clean", "loose", "method"):
        chosen = (p for p in pairs if p["kind"] == kind and not p["held_out"])
        kinds[kind] = [[[p["description"]], p["source"].strip()] for p in chosen]
    return kinds


def write_tasks(
    raw: Path,
    out: Path,
    pairs: list[dict[str, Any]],
    held_sources: list[str],
    kinds: dict[str, list[Any]],
) -> None:
    """Writes the chat tasks and the held-out data."""
    rng = random.Random(1)
    prose = [json.loads(line) for line in (raw / "prose.jsonl").open()]
    held_out = [p for p in pairs if p["held_out"] and p["kind"] != "method"]
    rng.shuffle(held_out)
    compositions = [vars(p) for p in random_compositions(COMPOSITIONS)[:HELD_OUT_COMPOSITIONS]]
    # A held-out file counts only if no function in it was trained on as a pair.
    learnt = [p["description"].rstrip(".") for p in pairs if not p["held_out"]]
    held_sources = [s for s in held_sources if not any(text in s for text in learnt)]
    held = {
        "pairs": held_out[:HELD_OUT_LIMIT],
        "sources": held_sources,
        "compositions": compositions,
    }
    (out / "held_out.json").write_text(json.dumps(held))
    everything = {"tasks": kinds, "prose": rng.sample(prose, min(6000, len(prose)))}
    (out / "tasks.json.xz").write_bytes(lzma.compress(json.dumps(everything).encode(), preset=3))


def main(raw: Path, out: Path) -> None:
    """Writes all training data."""
    from tokenizers import Tokenizer

    rng = random.Random(0)
    pairs = [json.loads(line) for line in (raw / "pairs.jsonl").open()]
    sources = [json.loads(line) for line in (raw / "sources.jsonl").open()]
    rng.shuffle(sources)
    kinds = tasks(pairs)
    chats = [
        phrase(rng.choice(a), rng) + "\n" + s
        for k in ("classic", "family")
        for a, s in kinds[k]
        for _ in range(10)
    ]
    chats += [
        asks[0] + "\n" + answer for k in ("clean", "loose", "method") for asks, answer in kinds[k]
    ]
    train_tokenizer([*sources[::4], *chats, *[SYSTEM_PROMPT] * 20], out / "tokenizer")
    tokenizer = Tokenizer.from_file(str(out / "tokenizer" / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)

    import numpy as np

    held_sources, sources = sources[:60], sources[60:]
    stream: list[np.ndarray] = []
    for first in range(0, len(sources), 500):
        for encoding in tokenizer.encode_batch(sources[first : first + 500]):
            stream.append(np.array([*encoding.ids, end], dtype=np.uint16))
    code = np.concatenate(stream)
    quarter = len(code) // 4 + 1
    for index in range(4):
        part = code[index * quarter : (index + 1) * quarter]
        # Two byte planes compress better than interleaved bytes.
        planes = np.concatenate([part.astype(np.uint8), (part >> 8).astype(np.uint8)])
        (out / f"code{index}.xz").write_bytes(lzma.compress(planes.tobytes(), preset=3))
    write_tasks(raw, out, pairs, held_sources, kinds)
    counts = {kind: len(items) for kind, items in kinds.items()}
    statistics = {"code_tokens": len(code), "tasks": counts, "sources": len(sources)}
    (out / "statistics.json").write_text(json.dumps(statistics, indent=1))
    print(statistics)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
