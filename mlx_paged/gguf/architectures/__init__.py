"""Architectures of GGUF's table that are read, each as a family of mlx-lm."""

from __future__ import annotations

from collections.abc import Callable

from mlx_paged.gguf.architectures import (
    deepseek,
    gemma,
    glm,
    gpt,
    llama,
    others,
    phi,
    qwen,
    qwen_linear,
)
from mlx_paged.gguf.architectures.base import Architecture
from mlx_paged.gguf.errors import GGUFError
from mlx_paged.gguf.metadata import Metadata

#: By GGUF's name. A function chooses among several kinds of models of one name.
ARCHITECTURES: dict[str, Architecture | Callable[[Metadata], Architecture]] = {
    "cohere2": others.COHERE2,
    "command-r": others.COHERE,
    "deepseek2": deepseek.deepseek2,
    "dots1": deepseek.DOTS1,
    "ernie4_5": others.ERNIE4_5,
    "ernie4_5-moe": others.ERNIE4_5_MOE,
    "exaone": others.EXAONE,
    "exaone4": others.EXAONE4,
    "gemma": gemma.GEMMA,
    "gemma2": gemma.GEMMA2,
    "gemma3": gemma.GEMMA3,
    "glm4": glm.GLM4,
    "glm4moe": glm.GLM4_MOE,
    "gpt-oss": gpt.GPT_OSS,
    "gpt2": gpt.GPT2,
    "granite": others.GRANITE,
    "granitemoe": others.GRANITE_MOE,
    "hunyuan-dense": others.HUNYUAN,
    "lfm2": others.LFM2,
    "lfm2moe": others.LFM2_MOE,
    "llama": llama.llama,
    "minicpm": others.MINICPM,
    "mistral3": llama.MINISTRAL3,
    "nemotron": others.NEMOTRON,
    "olmo2": others.OLMO2,
    "olmoe": others.OLMOE,
    "phi2": phi.PHI2,
    "phi3": phi.PHI3,
    "qwen2": qwen.QWEN2,
    "qwen2moe": qwen.QWEN2_MOE,
    "qwen3": qwen.QWEN3,
    "qwen35": qwen_linear.QWEN35,
    "qwen35moe": qwen_linear.QWEN35_MOE,
    "qwen3moe": qwen.QWEN3_MOE,
    "seed_oss": others.SEED_OSS,
    "smollm3": others.SMOLLM3,
    "stablelm": others.STABLELM,
    "starcoder2": others.STARCODER2,
}


def architecture_of(meta: Metadata) -> Architecture:
    """Returns the architecture of a file.

    Raises:
        GGUFError: It is not read.
    """
    name = meta.architecture
    if name == "clip":
        raise GGUFError(
            "it is the image encoder of a multimodal model (mmproj), not its text model"
        )
    if name not in ARCHITECTURES:
        raise GGUFError(
            f"its architecture {name!r} is not read from GGUF; those that are: "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    found = ARCHITECTURES[name]
    return found if isinstance(found, Architecture) else found(meta)
