"""The format of segments: what was written is read, and nothing else is."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from mlx_paged.offload import segments
from mlx_paged.offload.digests import next_digest, root_digest
from mlx_paged.offload.index import SegmentIndex
from mlx_paged.offload.segments import Block, SegmentError, layout, read_block, read_header
from mlx_paged.offload.warnings import Warnings

MODEL = bytes(range(16))
SIZES = [400, 64, 0]


def blocks_of(seed: int = 0, count: int = 12) -> list[Block]:
    rng = random.Random(seed)
    groups = [rng.choice([0, 0, 1, 2]) for _ in range(count)]
    return [
        Block(rng.randbytes(16), group, memoryview(rng.randbytes(SIZES[group]))) for group in groups
    ]


def write(path: Path, blocks: list[Block]) -> None:
    begin, _ = layout(MODEL, {"model": "a name"}, blocks)
    path.write_bytes(begin + b"".join(block.data for block in blocks))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path, blocks = tmp_path / "1.kv", blocks_of()
    write(path, blocks)
    header = read_header(path)
    assert header.model == MODEL and header.about == {"model": "a name"}
    assert [(r.digest, r.group) for r in header.records] == [(b.digest, b.group) for b in blocks]
    assert header.records[0].offset == segments.PAGE
    fd = os.open(path, os.O_RDONLY)
    for record, block in zip(header.records, blocks, strict=True):
        out = bytearray(record.length)
        assert read_block(fd, record, memoryview(out))
        assert out == block.data
    os.close(fd)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:10],
        lambda data: data[:100],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"other-format" + data[12:],
        lambda data: data[:8] + b"\xff\xff\xff\xff" + data[12:],
        lambda data: data[:40] + b"?" + data[41:],
    ],
)
def test_a_damaged_beginning_or_end_is_refused(tmp_path: Path, damage) -> None:
    path = tmp_path / "1.kv"
    write(path, blocks_of())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SegmentError):
        read_header(path)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Flips bits, cuts, repeats or overwrites parts of a file."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 3])):
        where, length = rng.randrange(len(out) + 1), rng.choice([1, 2, 8, 64, 1000])
        # Half of the damage is in the header.
        where = rng.randrange(min(len(out) + 1, 700)) if rng.random() < 0.5 else where
        match rng.randrange(5):
            case 0 if where < len(out):
                out[where] ^= 1 << rng.randrange(8)
            case 1:
                del out[where : where + length]
            case 2:
                out[where:where] = out[:length]
            case 3:
                out[where : where + length] = rng.randbytes(length)
            case _:
                del out[where:]
    return bytes(out)


@pytest.mark.parametrize(
    "count", [200, pytest.param(20_000, marks=pytest.mark.long)], ids=["few", "many"]
)
def test_no_damage_gives_wrong_bytes(tmp_path: Path, count: int) -> None:
    """Every block that a damaged file gives is one that was written, under its own digest."""
    path, blocks = tmp_path / "1.kv", blocks_of()
    write(path, blocks)
    data = path.read_bytes()
    known = {(b.digest, b.group): bytes(b.data) for b in blocks}
    rng, num_read, num_refused = random.Random(1), 0, 0
    for _ in range(count):
        path.write_bytes(mutated(data, rng))
        index = SegmentIndex(tmp_path, MODEL, SIZES, Warnings())
        index.look(now=True)
        for (digest, group), content in known.items():
            place = index.place(index.key(digest, group))
            if place is None:
                num_refused += 1
                continue
            segment, record = place
            out = bytearray(record.length)
            if read_block(segment.open(), record, memoryview(out)):
                assert out == content
                num_read += 1
            else:
                num_refused += 1
            segment.close()
    assert num_read > count and num_refused > count


def test_a_segment_of_another_model_or_layout_is_ignored(tmp_path: Path, caplog) -> None:
    write(tmp_path / "1.kv", blocks_of())
    for model, sizes in ((bytes(16), SIZES), (MODEL, [400, 64]), (MODEL, [400, 65, 0])):
        index = SegmentIndex(tmp_path, model, sizes, Warnings())
        index.look(now=True)
        assert len(index) == 0
    assert len(caplog.records) == 3


def test_a_foreign_file_is_one_warning(tmp_path: Path, caplog) -> None:
    for i in range(5):
        (tmp_path / f"{i}.kv").write_text("something else")
    (tmp_path / "6.kv").symlink_to("0.kv")
    write(tmp_path / "7.kv", blocks_of())
    index = SegmentIndex(tmp_path, MODEL, SIZES, Warnings())
    index.look(now=True)
    index.look(now=True)
    assert len(index) == 12
    [record] = caplog.records
    assert (
        "0.kv is ignored: it is too short" in record.getMessage() or "no segment" in record.message
    )


def test_digests_tell_everything_apart() -> None:
    def known(token: int) -> tuple[bytes, int] | None:
        return {1 << 31: (b"cat", 0), (1 << 31) + 1: (b"cat", 1), (1 << 31) + 9: (b"dog", 0)}.get(
            token
        )

    def block(*tokens: int) -> bytes:
        return b"".join(token.to_bytes(4, "little") for token in tokens)

    roots = [root_digest(MODEL, salt) for salt in (None, "", "a", "-", "+", "\0lora/1/")]
    roots.append(root_digest(bytes(16), None))
    assert len(set(roots)) == len(roots)
    texts = [block(1, 2), block(2, 1), block(1, 2, 3), block(1), block(1, 1 << 31)]
    texts += [block(1, (1 << 31) + 1), block(1, (1 << 31) + 9)]
    found = [next_digest(root, text, known) for root in roots for text in texts]
    assert None not in found and len(set(found)) == len(found)
    assert next_digest(roots[0], block(1, (1 << 31) + 2), known) is None
    # The number of an item in this process does not count.
    other = next_digest(roots[0], block(1, 3_000_000_000), lambda token: (b"cat", 0))
    assert other == next_digest(roots[0], block(1, 1 << 31), known)
