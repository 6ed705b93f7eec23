"""Seams: the complete list of mlx-lm symbols that are replaced or relied on, with signatures.

`patching` applies the list, restores everything on request, and replaces nothing if any entry does
not match.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any

#: mlx-lm versions whose own tests pass with the list applied.
CHECKED_ON = ("0.32.2",)


@dataclass(frozen=True)
class Seam:
    """One symbol of mlx-lm.

    Attributes:
        module: Module that defines it.
        symbol: Name in the module; ``Class.method`` for a method.
        signature: Parameters, in the format of `signature_of`.
        why: Reason to replace it or rely on it.
        maker: ``module:function`` under `mlx_paged.drop_in` that takes the original and returns the
            replacement; None for a symbol that is only relied on.
    """

    module: str
    symbol: str
    signature: str
    why: str
    maker: str | None = None

    @property
    def name(self) -> str:
        """Fully qualified name."""
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
    """Returns the owner of a symbol, its name there, and its current value or None."""
    owner: Any = module
    *path, name = symbol.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    # Read from the class dict, to get the raw function and not a bound one.
    found = vars(owner).get(name) if isinstance(owner, type) else getattr(owner, name, None)
    return owner, name, found


def signature_of(function: Any) -> str:
    """Formats the parameters of a callable: names, kinds, and a "=" after those with a default."""
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
    """Returns how a symbol differs from the seam, or None if it matches."""
    _, _, found = resolve(module, seam.symbol)
    if found is None:
        return f"{seam.name} does not exist (expected: {seam.signature})"
    actual = signature_of(found)
    if actual != seam.signature:
        return f"{seam.name} takes ({actual}) (expected: {seam.signature})"
    return None
