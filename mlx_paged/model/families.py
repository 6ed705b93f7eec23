"""The verified model families, with the mode in which each runs.

A family is a model module of mlx-lm. It is listed if a mixed step (prefill, decodes, a second
chunk, a resumed prefix and a preempted prompt together) matches mlx-lm's dense cache.
`tests/model/test_parity_families.py` checks every module of mlx-lm against this table. Other
families are refused by name, because one that seems to work could silently give wrong results.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_lm import __version__ as VERSION
from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING

from mlx_paged.errors import UnsupportedModelError
from mlx_paged.model.layout import Mode

#: The version that the table was verified with.
MLX_LM_VERSION = "0.32.2"

_NATIVE = """
    Klear afm7 afmoe apertus bailing_moe bitnet cohere cohere2 dbrx deepseek deepseek_v2
    deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe gemma gemma2 gemma3
    gemma3_text gemma3n gemma4 gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode
    gpt_neox gpt_oss gptj granite granitemoe helium hunyuan hunyuan_v1_dense internlm2 internlm3
    iquestloopcoder kimi_k25 kimi_vl laguna lille-130m llama llama4 llama4_text longcat_flash
    mellum mimo mimo_v2_flash minicpm minicpm3 minimax ministral3 mistral3 mistral4 mixtral
    muse_glimmer muse_spark nanbeige nanochat nemotron nemotron-nas olmo2 olmo3 olmoe openelm phi
    phi3 phimoe phixtral pixtral plamo qwen qwen2 qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_vl
    qwen3_vl_moe seed_oss smollm3 solar_open spark2_5 stablelm starcoder2 step3p5 talkie telechat3
    youtu_llm
"""
_REGROUPED = """
    bailing_hybrid bailing_moe_linear bailing_moe_v3 falcon_h1 gear granitemoehybrid jamba kimi_k3
    kimi_linear lfm2 lfm2-vl lfm2_moe longcat_flash_ngram mamba mamba2 nemotron_h olmo_hybrid plamo2
    prism_hadamard_qwen35 qwen3_5 qwen3_5_moe qwen3_next recurrent_gemma rwkv7
"""
_GATHERED = "baichuan_m1 deepseek_v32 glm_moe_dsa"
_UNIFORM = "minimax_m3_vl"

#: Verified families, with the mode of each. A model may need a later mode of `Mode`, for example
#: with dynamic RoPE scaling, but never an earlier one.
PROVEN: dict[str, Mode] = {
    **dict.fromkeys(_NATIVE.split(), Mode.NATIVE),
    **dict.fromkeys(_REGROUPED.split(), Mode.REGROUPED),
    **dict.fromkeys(_GATHERED.split(), Mode.GATHERED),
    **dict.fromkeys(_UNIFORM.split(), Mode.UNIFORM),
}

#: Families of mlx-lm that are refused, and why.
REFUSED: dict[str, str] = {
    "deepseek_v41": (
        "its layers keep windows, compressed groups and open groups in a cache of their own, whose "
        "contents depend on where a step began"
    ),
    "olmo": (
        "mlx-lm's own forward of it fails on prompts: it adds its mask, which is the word "
        "'causal', to scores"
    ),
    "phi3small": (
        "mlx-lm's block-sparse mask for it depends on where a prompt is cut into chunks, so "
        "answers would depend on the other requests of a step"
    ),
    "plamo3": (
        "mlx-lm masks a window for it that is one token wider than its cache, so answers would "
        "depend on where a prompt is cut into chunks, and on what is cached of it"
    ),
}


@dataclass(frozen=True)
class Family:
    """A family and its modes.

    Attributes:
        name: Module of mlx-lm, or the name given to `register_family`.
        modes: Modes to try, in order.
        verify: Compare every model with the dense cache before its first use.
        proven: The mode that needs no comparison; None if every mode does.
    """

    name: str
    modes: tuple[Mode, ...]
    verify: bool = False
    proven: Mode | None = None

    def must_compare(self, mode: Mode) -> bool:
        """True if a model that runs in this mode must be compared."""
        return self.verify or (self.proven is not None and mode is not self.proven)


_registered: dict[str, Family] = {}


def register_family(
    model_type: str, *, mode: Mode | str | None = None, verify: bool = True
) -> None:
    """Lets a family be served that is not in this package's table.

    Args:
        model_type: Its name in ``config.json``.
        mode: Its mode; None: the first mode of `Mode` in which its model runs.
        verify: Compare every model of the family with the dense cache when it is loaded, and refuse
            it if they differ. Pass False if you have compared them yourself.

    Raises:
        ValueError: The family is verified already, or the mode is unknown.
    """
    if model_type in PROVEN:
        raise ValueError(f"model_type {model_type!r} is proven and needs no registration")
    modes = tuple(Mode) if mode is None else (Mode(mode),)
    _registered[model_type] = Family(model_type, modes, verify)


def unregister_family(model_type: str) -> None:
    """Forgets a registered family. Does nothing if it is not registered."""
    _registered.pop(model_type, None)


# Types, and ends of the names of architectures, of models that do not generate.
_ENCODER_TYPES = re.compile(
    r"bert|electra|mpnet|xlm|deberta|longformer|big_bird|nomic|^esm|clip|siglip|vit$|dinov|whisper"
    r"|wav2vec|hubert|(^|_)m?u?t5|bart|pegasus|marian|m2m|nllb|^led$|prophetnet|fsmt|blenderbot"
)
_ENCODER_ENDINGS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification",
                    "ForQuestionAnswering", "ForMultipleChoice", "EncoderModel")  # fmt: skip


def module_of(config: Mapping[str, Any]) -> str:
    """Returns the module of mlx-lm that runs a model of this ``config.json``."""
    model_type = str(config.get("model_type", ""))
    for architecture in config.get("architectures") or ():
        special = MODEL_ARCHITECTURE_REMAPPING.get((model_type, architecture))
        if special is not None:
            return str(special)
    return str(MODEL_REMAPPING.get(model_type, model_type))


def require_family(config: Mapping[str, Any]) -> Family:
    """Returns the family of a model, if it is verified or registered.

    Raises:
        UnsupportedModelError: It names the model type, the reason, and the supported families.
    """
    model_type = str(config.get("model_type", ""))
    module = module_of(config)
    if model_type in _registered:
        return _registered[model_type]
    if module in PROVEN:
        modes = tuple(Mode)
        # Another mlx-lm may have changed the module, so every model is compared before its use.
        return Family(
            module,
            modes[modes.index(PROVEN[module]) :],
            verify=VERSION != MLX_LM_VERSION,
            proven=PROVEN[module],
        )
    reason = REFUSED.get(module)
    if reason is None and is_encoder(config):
        reason = (
            "it is an encoder, or an encoder-decoder model, and only decoders are served; for "
            "embeddings take one of those, such as Qwen3-Embedding (docs/pooling.md)"
        )
    if reason is None:
        reason = (
            f"the paged cache has not been proven for it with mlx-lm {MLX_LM_VERSION}"
            if _exists(module)
            else f"mlx-lm {MLX_LM_VERSION} has no such model"
        )
    raise UnsupportedModelError(model_type, reason, sorted({*PROVEN, *_registered}))


def is_encoder(config: Mapping[str, Any]) -> bool:
    """True if a model does not generate text token by token."""
    if config.get("is_encoder_decoder"):
        return True
    model_type = str(config.get("model_type", "")).lower().replace("-", "_")
    architectures = [str(name) for name in config.get("architectures") or ()]
    return (
        _ENCODER_TYPES.search(model_type) is not None
        or any(name.endswith(_ENCODER_ENDINGS) for name in architectures)
    ) and not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures)


def _exists(module: str) -> bool:
    # Finds the file, because importing some modules has side effects.
    return module.replace("-", "_").replace(".", "_").isidentifier() and (
        importlib.util.find_spec("mlx_lm.models") is not None
        and importlib.util.find_spec(f"mlx_lm.models.{module}") is not None
    )
