"""Architectures of GGUF's table that are read, each as a family of mlx-lm."""

from __future__ import annotations

from mlx_paged.gguf.architectures import llama
from mlx_paged.gguf.architectures.base import Architecture
from mlx_paged.gguf.errors import GGUFError
from mlx_paged.gguf.metadata import Metadata

#: By GGUF's name. A mixture of experts under the name of a dense model is "NAME+experts".
ARCHITECTURES: dict[str, Architecture] = {
    "llama": llama.LLAMA,
    "llama+experts": llama.MIXTRAL,
}


def architecture_of(meta: Metadata) -> Architecture:
    """Returns the architecture of a file.

    Raises:
        GGUFError: It is not read.
    """
    name = meta.architecture
    mixture = f"{name}+experts"
    if mixture in ARCHITECTURES and meta.integer("expert_count", 0):
        return ARCHITECTURES[mixture]
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    if name == "clip":
        raise GGUFError(
            "it is the image encoder of a multimodal model (mmproj), not its text model"
        )
    known = ", ".join(sorted({name.partition("+")[0] for name in ARCHITECTURES}))
    raise GGUFError(f"its architecture {name!r} is not read from GGUF; those that are: {known}")
