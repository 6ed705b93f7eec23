"""GGUFFile: the metadata and tensors of a GGUF file, or of all parts of a split one.

The file is mapped into memory and its header is read once. Every length in it is checked against
the file's size before it is used, so a damaged file gives a `GGUFError`. The `gguf` package's own
reader is not used: it takes 7 s for the header of a model with 49k tokens (this one 0.1 s), and
some damaged files make it loop for ever.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mlx_paged.gguf.errors import GGUFError
from mlx_paged.gguf.types import TYPES, Tensor, num_bytes, row_bytes

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_DIMS = 4
# Value types of metadata: struct's letter of each scalar.
_SCALARS = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"},
    **{10: "Q", 11: "q", 12: "d"},
}
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_MAX_SHOWN = 60


def is_gguf(path: str | Path) -> bool:
    """True if a path is an existing file, named ``*.gguf`` or with GGUF's first bytes."""
    path = Path(path)
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == _MAGIC
    except OSError:
        return False


def stem_of(path: str | Path) -> str:
    """Returns the name of a model from its file: without the suffix and the part's number."""
    name = Path(path).name
    return _PART.sub("", name) if _PART.search(name) else name.removesuffix(".gguf")


class GGUFFile:
    """A model's metadata and tensors.

    Args:
        path: A file, or any part of a split one; the other parts are beside it.

    Attributes:
        metadata: Values by key: numbers, booleans, strings, numpy arrays of numbers, and lists of
            strings.

    Raises:
        GGUFError: It is no GGUF file, or it is damaged; the message gives the reason.
        OSError: It cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        parts = [_Part(each) for each in parts_of(Path(path))]
        self.path = parts[0].path
        self.metadata: Mapping[str, Any] = parts[0].metadata
        self._parts = parts
        self._places: dict[str, tuple[_Part, Tensor]] = {}
        for part in parts:
            for tensor in part.tensors:
                if tensor.name in self._places:
                    raise GGUFError(f"{part.path.name} has a second tensor {tensor.name!r}")
                self._places[tensor.name] = (part, tensor)
        expected = self.metadata.get("split.tensors.count")
        if expected is not None and expected != len(self._places):
            raise GGUFError(f"its parts have {len(self._places)} tensors instead of {expected}")

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __len__(self) -> int:
        return len(self._places)

    def names(self) -> Iterator[str]:
        """Names of the tensors, in the order of the file."""
        return iter(self._places)

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor.

        Raises:
            GGUFError: There is none of that name.
        """
        if name not in self._places:
            raise GGUFError(f"it has no tensor {name!r}")
        return self._places[name][1]

    def release(self, name: str) -> None:
        """Lets the kernel drop a tensor's pages from this process; reading it again is possible.

        Mapped pages count as resident memory, so a load that keeps them holds the model twice.
        """
        part, tensor = self._places[name]
        part.release(tensor)


class _Part:
    """One file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise GGUFError(f"{path.name} is not a file")
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < 24:
                raise GGUFError(_ends(path, size, "its header"))
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.bytes = np.frombuffer(self._map, np.uint8)
        header = _Header(path, self._map)
        self.metadata = header.metadata
        self.tensors = [self._tensor(*entry, header.data_start) for entry in header.tensors]

    def _tensor(
        self, name: str, shape: tuple[int, ...], type_id: int, offset: int, start: int
    ) -> Tensor:
        kind = TYPES.get(type_id)
        if kind is None:
            raise GGUFError(f"its tensor {name!r} has the unknown type {type_id}")
        nbytes, row = num_bytes(kind, shape), row_bytes(kind, shape)
        if nbytes is None or row is None:
            raise GGUFError(
                f"its tensor {name!r} has rows of {shape[-1]} elements, which are no whole blocks "
                f"of {kind.name} ({kind.block} elements)"
            )
        first = start + offset
        if first + nbytes > len(self.bytes):
            raise GGUFError(_ends(self.path, len(self.bytes), f"its tensor {name!r}"))
        rows = self.bytes[first : first + nbytes].reshape(*shape[:-1], row)
        return Tensor(name, kind, rows)

    def release(self, tensor: Tensor) -> None:
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        base = self.bytes.__array_interface__["data"][0]
        begin = tensor.rows.__array_interface__["data"][0] - base
        # Whole pages only: the first and the last may belong to other tensors, too.
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, first, begin + tensor.rows.nbytes - first)


class _Header:
    """Parses everything before the tensors' data."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 4
        if data[:4] != _MAGIC:
            raise GGUFError(f"{path.name} is not a GGUF file: it begins with {data[:4]!r}")
        version = self._number("I")
        if version not in _VERSIONS:
            if version & 0xFFFF == 0:
                raise GGUFError("it is big-endian, and only little-endian files are read")
            raise GGUFError(f"its version of GGUF is {version}, and only 2 and 3 are read")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string("a key of its metadata")
            if key in self.metadata:
                raise GGUFError(f"its metadata has a second {_shown(key)}")
            self.metadata[key] = self._value(key)
        self.tensors = [self._entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise GGUFError(f"its general.alignment must be a power of two but is {alignment!r}")
        self.data_start = -(-self._at // alignment) * alignment
        for name, _, _, offset in self.tensors:
            if offset % alignment:
                raise GGUFError(f"its tensor {name!r} is not aligned to {alignment} bytes")

    def _take(self, size: int, what: str) -> int:
        """Returns the position of the next `size` bytes, and moves behind them."""
        begin = self._at
        if size > len(self._data) - begin:
            raise GGUFError(_ends(self._path, len(self._data), what))
        self._at = begin + size
        return begin

    def _number(self, letter: str, what: str = "its header") -> Any:
        begin = self._take(struct.calcsize(f"<{letter}"), what)
        return struct.unpack_from(f"<{letter}", self._data, begin)[0]

    def _string(self, what: str) -> str:
        size = self._number("Q", what)
        begin = self._take(size, what)
        try:
            return self._data[begin : begin + size].decode()
        except UnicodeDecodeError as error:
            raise GGUFError(f"{what} is not valid UTF-8 ({error.reason})") from error

    def _value(self, key: str) -> Any:
        what = f"its metadata {_shown(key)}"
        kind = self._number("I", what)
        if kind == _STRING:
            return self._string(what)
        if kind != _ARRAY:
            return self._number(self._scalar(kind, what), what)
        kind, count = self._number("I", what), self._number("Q", what)
        if kind == _STRING:
            return self._strings(count, what)
        dtype = np.dtype(f"<{self._scalar(kind, what)}")
        begin = self._take(count * dtype.itemsize, what)
        return np.frombuffer(self._data, dtype, count, begin).copy()

    def _scalar(self, kind: int, what: str) -> str:
        if kind not in _SCALARS:
            problem = "arrays of arrays" if kind == _ARRAY else f"the unknown type {kind}"
            raise GGUFError(f"{what} has {problem}")
        return _SCALARS[kind]

    def _strings(self, count: int, what: str) -> list[str]:
        """Reads an array of strings. Optimized: a vocabulary has hundreds of thousands."""
        data, at, size = self._data, self._at, len(self._data)
        unpack, found = struct.Struct("<Q").unpack_from, []
        try:
            for _ in range(count):
                begin = at + 8
                at = begin + unpack(data, at)[0]
                if at > size:
                    raise GGUFError(_ends(self._path, size, what))
                found.append(data[begin:at].decode())
        except struct.error as error:
            raise GGUFError(_ends(self._path, size, what)) from error
        except UnicodeDecodeError as error:
            raise GGUFError(
                f"{what} is not valid UTF-8 at {len(found)} ({error.reason})"
            ) from error
        self._at = at
        return found

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("the name of a tensor")
        what = f"the shape of its tensor {_shown(name)}"
        num_dims = self._number("I", what)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise GGUFError(f"its tensor {_shown(name)} has {num_dims} dimensions")
        shape = tuple(self._number("Q", what) for _ in range(num_dims))[::-1]
        if 0 in shape:
            raise GGUFError(f"its tensor {_shown(name)} is empty")
        return name, shape, self._number("I", what), self._number("Q", what)


def parts_of(path: Path) -> list[Path]:
    """Returns the files of a split model, in order; the file itself if it is whole."""
    match = _PART.search(path.name)
    if match is None:
        return [path]
    base, count = path.name[: match.start()], int(match[2])
    found = [path.with_name(f"{base}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    missing = [part.name for part in found if not part.is_file()]
    if missing:
        raise GGUFError(f"{len(missing)} of its {count} parts are missing: {missing[0]}")
    if not found:
        raise GGUFError("its name says that it has no parts")
    return found


def _ends(path: Path, size: int, where: str) -> str:
    return f"{path.name} is cut off or damaged: its {size} bytes end within {where}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
