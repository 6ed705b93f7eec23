"""LoRARequest: the adapter of a request, with vLLM's fields."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_paged.errors import InvalidParameterError


@dataclass(frozen=True)
class LoRARequest:
    """Names an adapter.

    The files identify it: requests with the same path share an adapter, and once the files change,
    the next request gets a new one.

    Attributes:
        lora_name: For logs and metrics.
        lora_int_id: At least 1. Accepted for compatibility with vLLM; not used.
        lora_path: Directory with the adapter's files, in mlx-lm's or PEFT's format.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise InvalidParameterError("lora_name", "a non-empty string", self.lora_name)
        number = self.lora_int_id
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise InvalidParameterError("lora_int_id", "an integer of at least 1", number)
        if not isinstance(self.lora_path, (str, Path)) or not str(self.lora_path):
            raise InvalidParameterError("lora_path", "a directory", self.lora_path)
        object.__setattr__(self, "lora_path", str(self.lora_path))


def checked_request(value: Any) -> LoRARequest | None:
    """Returns a `LoRARequest` or None unchanged.

    Raises:
        InvalidParameterError: It is anything else.
    """
    if value is None or isinstance(value, LoRARequest):
        return value
    raise InvalidParameterError("lora_request", "a LoRARequest or None", value)
