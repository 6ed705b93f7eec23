"""Where mlx-lm is replaced: every symbol, why, and what it must look like for that.

The list is complete. `patching` reads it, replaces nothing where mlx-lm differs from it anywhere,
and puts everything back on request.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any

#: Versions of mlx-lm on which the list was checked, by running mlx-lm's own tests with it.
CHECKED_ON = ("0.32.2",)


@dataclass(frozen=True)
class Seam:
    """One symbol of mlx-lm.

    Attributes:
        module: Where it is defined.
        symbol: Its name there; ``Class.method`` for a method.
        signature: Its parameters, as `signature_of` writes them.
        why: What it is replaced for; for a symbol that is only relied on, what for.
        maker: ``module:function`` under `mlx_paged.drop_in` that takes the original and returns
            its replacement; None for a symbol that is only relied on.
    """

    module: str
    symbol: str
    signature: str
    why: str
    maker: str | None = None

    @property
    def name(self) -> str:
        """Where it is, in full."""
        return f"{self.module}.{self.symbol}"


_CACHE, _GENERATE = "mlx_lm.models.cache", "mlx_lm.generate"

SEAMS = (
    Seam(
        _CACHE,
        "make_prompt_cache",
        "model, max_kv_size=",
        "caches of the model's paged store, where the family is proven",
        "generation:make_prompt_cache",
    ),
    Seam(
        _CACHE,
        "save_prompt_cache",
        "file_name, cache, metadata=",
        "writes dense caches under mlx-lm's class names, so that plain mlx-lm can load the file",
        "generation:save_prompt_cache",
    ),
    Seam(
        _GENERATE,
        "generate_step",
        "prompt, model, stream=, *, max_tokens=, sampler=, logits_processors=, max_kv_size=, "
        "prompt_cache=, prefill_step_size=, kv_bits=, kv_group_size=, quantized_kv_start=, "
        "prompt_progress_callback=, input_embeddings=",
        "it knows the tokens: what the store has of a prompt is not computed again",
        "generation:generate_step",
    ),
    Seam(
        _GENERATE,
        "speculative_generate_step",
        "prompt, model, draft_model, stream=, *, num_draft_tokens=, max_tokens=, sampler=, "
        "logits_processors=, prompt_cache=, prefill_step_size=, kv_bits=, kv_group_size=, "
        "quantized_kv_start=",
        "the same for the two models of speculative decoding",
        "generation:speculative_generate_step",
    ),
    Seam(
        _GENERATE,
        "BatchGenerator",
        "model, *, max_tokens=, stop_tokens=, sampler=, logits_processors=, "
        "completion_batch_size=, prefill_batch_size=, prefill_step_size=, max_kv_size=, stream=",
        "continuous batching over the store: no padding, shared prefixes, mixed steps",
        "batch:batch_generator",
    ),
    Seam(
        "mlx_lm.utils",
        "load_model",
        "model_path, lazy=, strict=, model_config=, get_model_classes=, trust_remote_code=",
        "RoPE of checkpoints that transformers 5 saved, which most modules of mlx-lm do not read",
        "loading:load_model",
    ),
    Seam(
        "mlx_lm.server",
        "ResponseGenerator._tokenize",
        "self, tokenizer, request, args",
        "an empty prompt begins with the model's first token; mlx-lm's server ends with it",
        "generation:tokenize",
    ),
    Seam(
        _GENERATE,
        "BatchGenerator.insert_segments",
        "self, segments, max_tokens=, caches=, all_tokens=, samplers=, logits_processors=, "
        "stop_sequences=",
        "checks and completes what is inserted; the store takes it from there",
    ),
    Seam(_GENERATE, "BatchGenerator._next", "self", "what `next` and `next_generated` call"),
    Seam(
        _GENERATE,
        "PromptProcessingBatch.Response",
        "uid, progress, end_of_segment, end_of_prompt",
        "what `next` returns for prompts",
    ),
    Seam(
        _GENERATE,
        "GenerationBatch.Response",
        "uid, token, logprobs, finish_reason, prompt_cache, all_tokens",
        "what `next` returns for tokens",
    ),
    Seam(_CACHE, "KVCache.update_and_fetch", "self, keys, values", "how models use a cache"),
    Seam(_CACHE, "KVCache.make_mask", "self, *args, **kwargs", "the same"),
)


def resolve(module: ModuleType, symbol: str) -> tuple[Any, str, Any]:
    """The owner of a symbol, its name there, and what is there now (None where nothing is)."""
    owner: Any = module
    *path, name = symbol.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    # From a class as it is stored there, not bound.
    found = vars(owner).get(name) if isinstance(owner, type) else getattr(owner, name, None)
    return owner, name, found


def signature_of(function: Any) -> str:
    """Parameters of a callable: names, kinds, and which of them have a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "not a callable"
    parts, only_by_name = [], False
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            only_by_name = True
        elif p.kind is p.KEYWORD_ONLY and not only_by_name:
            parts.append("*")
            only_by_name = True
        prefix = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        parts.append(f"{prefix}{p.name}{'' if p.default is p.empty else '='}")
    return ", ".join(parts)


def mismatch(module: ModuleType, seam: Seam) -> str | None:
    """Returns how a symbol differs from what is expected; None where it does not."""
    _, _, found = resolve(module, seam.symbol)
    if found is None:
        return f"{seam.name} does not exist (expected: {seam.signature})"
    actual = signature_of(found)
    if actual != seam.signature:
        return f"{seam.name} takes ({actual}) (expected: {seam.signature})"
    return None
