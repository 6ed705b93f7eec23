"""Serializes bodies as JSON, large ones piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar, cast

from pydantic_core import to_json

T = TypeVar("T")


class Lazy(Generic[T]):
    """A list whose entries are made only while it is serialized, because they may be large."""

    def __init__(self, entries: Iterable[T]) -> None:
        self._entries = entries

    @classmethod
    def list(cls, entries: Iterable[T]) -> list[T]:
        """Returns a `Lazy`, typed as the list that `json_pieces` writes."""
        return cast("list[T]", cls(entries))

    def __iter__(self) -> Iterator[T]:
        return iter(self._entries)


def json_pieces(value: Any) -> Iterator[bytes]:
    """Yields a body as JSON; each piece takes about as long as one entry of a `Lazy` list.

    Args:
        value: Dicts. Lists in them are serialized in one piece, unless they are `Lazy`.
    """
    if isinstance(value, Lazy):
        separator = b"["
        for entry in value:
            yield separator
            yield from json_pieces(entry)
            separator = b","
        yield b"[]" if separator == b"[" else b"]"
    elif isinstance(value, Mapping) and _is_lazy(value):
        separator = b"{"
        for key, entry in value.items():
            yield separator + to_json(key) + b":"
            yield from json_pieces(entry)
            separator = b","
        yield b"}"
    else:
        yield json_bytes(value)


def json_bytes(value: Any) -> bytes:
    """Returns a body as JSON, in one piece."""
    return to_json(value, fallback=list)  # for `Lazy`


def _is_lazy(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_is_lazy, value.values()))
    return isinstance(value, Lazy)
