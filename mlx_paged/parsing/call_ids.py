"""Ids of tool calls, in the forms that chat templates accept."""

from __future__ import annotations

import hashlib
import string
import uuid
from collections.abc import Callable

_LETTERS = string.digits + string.ascii_letters


def _usual(id: str, name: str, index: int) -> str:
    return f"call_{hashlib.sha256(id.encode(errors='replace')).hexdigest()[:24]}"


def _nine(id: str, name: str, index: int) -> str:
    number = int.from_bytes(hashlib.sha256(id.encode(errors="replace")).digest()[:16])
    return "".join(_LETTERS[number // 62**i % 62] for i in range(9))


#: Forms of ids, by name: a function of another id, the tool's name, and the number of calls before.
ID_FORMS: dict[str, Callable[[str, str, int], str]] = {
    "usual": _usual,
    "nine": _nine,  # Mistral
    "named": lambda id, name, index: f"functions.{name}:{index}",  # Kimi
    "number": lambda id, name, index: str(index),  # Cohere
}


def new_call_id(name: str, index: int, form: str = "usual") -> str:
    """Returns an id for a call without one.

    Args:
        name: Name of the tool.
        index: Number of calls in the conversation before it.
        form: A key of `ID_FORMS`.
    """
    return ID_FORMS[form](uuid.uuid4().hex, name, index)
