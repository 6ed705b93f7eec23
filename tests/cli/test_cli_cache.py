"""`mlx-paged cache`: folders of KV blocks are shown, checked and cleared."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlx_paged.cli.main import app
from mlx_paged.offload.segments import Block, layout

MODELS = [bytes([i]) * 16 for i in (1, 2)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two models with two segments each, of three blocks of 32 tokens."""
    rng = random.Random(0)
    for model in MODELS:
        (tmp_path / model.hex()).mkdir()
        about = {"model": f"/models/m{model[0]}", "kv_cache_dtype": "int8", "block_size": 32}
        for i in range(2):
            blocks = [
                Block(rng.randbytes(16), group, memoryview(rng.randbytes(500)))
                for group in (0, 0, 0, 1)
            ]
            begin, _ = layout(model, about, blocks)
            path = tmp_path / model.hex() / f"{i}.kv"
            path.write_bytes(begin + b"".join(block.data for block in blocks))
    (tmp_path / "notes.txt").write_text("not ours")
    return tmp_path


def run(*args: object):
    return CliRunner().invoke(app, ["cache", *map(str, args)])


def test_show(folder: Path) -> None:
    (folder / (16 * "ab")).mkdir()  # a process that has written nothing yet
    shown = run("show", folder)
    assert shown.exit_code == 0
    line = next(line for line in shown.stdout.splitlines() if line.startswith("m1"))
    assert (
        line.split()[:6] == ["m1", "int8,", "32", "192", "2", "11.9"]
        and MODELS[0].hex()[:12] in line
    )
    found = json.loads(run("show", folder, "--json").stdout)
    assert [each["num_tokens"] for each in found] == [192, 192] and not found[0]["damaged"]


def test_verify_finds_each_damage(folder: Path) -> None:
    assert run("verify", folder).exit_code == 0
    paths = sorted(folder.rglob("*.kv"))
    data = bytearray(paths[0].read_bytes())
    data[-700] ^= 1  # in a block: its header is intact
    paths[0].write_bytes(data)
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    paths[2].write_bytes(paths[0].read_bytes())
    checked = run("verify", folder)
    assert checked.exit_code == 1 and "1 files are intact, 3 damaged" in checked.stderr
    for path, reason in zip(paths, ("block at byte", "instead of", "another model"), strict=False):
        assert any(path.name in line and reason in line for line in checked.stderr.splitlines())
    assert len(json.loads(run("verify", folder, "--json").stdout)[0]["damaged"]) == 2
    assert run("show", folder).exit_code == 0


def test_clear(folder: Path) -> None:
    refused = run("clear", folder, "--model", "abc")
    assert refused.exit_code != 0 and len(list(folder.rglob("*.kv"))) == 4
    cleared = run("clear", folder, "--model", MODELS[1].hex()[:6])
    assert cleared.exit_code == 0 and "11.9 KiB" in cleared.stderr
    assert {path.parent.name for path in folder.rglob("*.kv")} == {MODELS[0].hex()}
    assert run("clear", folder).exit_code == 0 and not list(folder.rglob("*.kv"))
    assert (folder / "notes.txt").exists()
    assert "no blocks" in run("show", folder).stderr


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    for verb in ("show", "verify", "clear"):
        assert run(verb, tmp_path / "none").exit_code != 0
