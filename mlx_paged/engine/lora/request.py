"""LoRARequest: the adapter of a request, with vLLM's fields."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_paged.errors import InvalidParameterError


@dataclass(frozen=True)
class LoRARequest:
    """Names an adapter.

    The files decide which adapter it is: requests with the same path have the same adapter, and
    files that change under a path are another one from the next request on.

    Attributes:
        lora_name: For logs and metrics.
        lora_int_id: vLLM's id, at least 1. Nothing depends on it.
        lora_path: Directory with the adapter's files, in mlx-lm's or PEFT's format.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise InvalidParameterError("lora_name", "a string that is not empty", self.lora_name)
        number = self.lora_int_id
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise InvalidParameterError("lora_int_id", "an integer of at least 1", number)
        if not isinstance(self.lora_path, (str, Path)) or not str(self.lora_path):
            raise InvalidParameterError("lora_path", "a directory", self.lora_path)
        object.__setattr__(self, "lora_path", str(self.lora_path))


def checked_request(value: Any) -> LoRARequest | None:
    """Returns a `LoRARequest` as it is.

    Raises:
        InvalidParameterError: It is anything else but None.
    """
    if value is None or isinstance(value, LoRARequest):
        return value
    raise InvalidParameterError("lora_request", "a LoRARequest or None", value)
