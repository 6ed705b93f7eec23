"""The reader: metadata and tensors as the `gguf` package writes them, and damaged files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from support.gguf_cases import LLAMA
from support.gguf_files import random_model, write_file, write_model

from mlx_paged.gguf.errors import GGUFError
from mlx_paged.gguf.metadata import Metadata
from mlx_paged.gguf.reader import GGUFFile, is_gguf, stem_of

VALUES = {
    "a.uint8": ("uint8", 7),
    "a.int8": ("int8", -7),
    "a.uint16": ("uint16", 700),
    "a.int16": ("int16", -700),
    "a.uint32": ("uint32", 70000),
    "a.int32": ("int32", -70000),
    "a.uint64": ("uint64", 1 << 40),
    "a.int64": ("int64", -(1 << 40)),
    "a.float32": ("float32", 0.5),
    "a.float64": ("float64", 0.1),
    "a.bool": ("bool", True),
    "a.text": ("string", "Grüße \u4f60"),
    "a.numbers": ("array", [1, -2, 3]),
    "a.fractions": ("array", [0.5, 0.25]),
    "a.texts": ("array", ["one", "", "\u4f60"]),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama."""
    path = tmp_path_factory.mktemp("gguf") / "tiny-Q8_0.gguf"
    return write_model(path, LLAMA, random_model(LLAMA.config))


def test_values_of_all_types(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    for name, (kind, value) in VALUES.items():
        getattr(writer, f"add_{kind}")(name, value)
    writer.add_tensor("w", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("v", np.arange(4, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "a.gguf")
    assert file.metadata["general.architecture"] == "llama"
    for name, (_, value) in VALUES.items():
        found = file.metadata[name]
        assert (found.tolist() if isinstance(found, np.ndarray) else found) == value, name
    assert list(file.names()) == ["w", "v"] and len(file) == 2 and "w" in file
    w = file.tensor("w")
    assert w.shape == (2, 3) and w.type.name == "F32"
    assert w.rows.view(np.float32).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert file.tensor("v").rows.view(np.float16).tolist() == [0, 1, 2, 3]
    with pytest.raises(GGUFError, match=r"no tensor 'x'"):
        file.tensor("x")


def test_released_pages_can_be_read_again(whole: Path) -> None:
    file = GGUFFile(whole)
    before = {name: file.tensor(name).rows.copy() for name in file.names()}
    for name in before:
        file.release(name)
    for name, rows in before.items():
        assert np.array_equal(file.tensor(name).rows, rows)


def test_split_files_are_one(tmp_path: Path, whole: Path) -> None:
    model = random_model(LLAMA.config)
    write_model(tmp_path / "tiny.gguf", LLAMA, model, split_max_tensors=10)
    parts = sorted(tmp_path.glob("tiny-*.gguf"))
    assert [part.name for part in parts] == [f"tiny-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    one = GGUFFile(whole)
    for part in parts:  # any of them names the model
        file = GGUFFile(part)
        assert set(file.names()) == set(one.names())
        assert all(np.array_equal(file.tensor(n).rows, one.tensor(n).rows) for n in one.names())
        assert file.metadata["llama.block_count"] == 3
    assert stem_of(parts[1]) == "tiny" and stem_of("tiny-Q4_0.gguf") == "tiny-Q4_0"
    parts[2].unlink()
    with pytest.raises(GGUFError, match=r"1 of its 3 parts are missing: tiny-00003-of-00003.gguf"):
        GGUFFile(parts[0])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "cut off or damaged: its 0 bytes end"),
        (b"GGUF", "cut off or damaged: its 4 bytes end"),
        (b"PK\x03\x04" + bytes(60), "not a GGUF file: it begins with"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(60), "version of GGUF is 1"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(60), "big-endian"),
        (b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 16 + bytes(60), "second ''"),
        (
            b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + b"\xff" * 16 + bytes(60),
            "end within a key of its metadata",
        ),
    ],
)
def test_no_gguf(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(GGUFError, match=reason):
        GGUFFile(path)


def test_a_file_is_known_by_its_name_or_first_bytes(tmp_path: Path, whole: Path) -> None:
    blob = tmp_path / "sha256-1234"  # Ollama's names
    blob.write_bytes(whole.read_bytes())
    assert is_gguf(whole) and is_gguf(blob)
    assert not is_gguf(tmp_path) and not is_gguf(tmp_path / "missing.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert not is_gguf(tmp_path / "config.json")


def test_metadata_of_another_type_is_named(tmp_path: Path) -> None:
    keys = {**LLAMA.metadata, "block_count": "three"}
    path = write_file(tmp_path / "a.gguf", "llama", keys, {"w": np.zeros((2, 2), np.float32)})
    meta = Metadata(GGUFFile(path))
    with pytest.raises(GGUFError, match=r"llama.block_count must be an integer but is 'str'"):
        meta.size("block_count")
    with pytest.raises(GGUFError, match=r"no llama.expert_count"):
        meta.size("expert_count")
    assert meta.size("expert_count", None) is None
