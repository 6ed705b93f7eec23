"""Replacement forwards for modules of mlx-lm and mlx-vlm that cannot run a flat step, by class.

Most model code runs unchanged. These modules compute attention themselves, or positions on the
host. Each function here computes the same for rows of one token each. Outside of a step, a module
keeps its own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_paged.model.caches import KVHandle, PagedLayerCache, StepContext
from mlx_paged.model.overrides import Overrides
from mlx_paged.model.rope_frequencies import LongRoPE


def _heads(x: mx.array, num_heads: int) -> mx.array:
    """``[T, 1, num_heads * dim]`` -> ``[T, num_heads, 1, dim]``."""
    return x.reshape(x.shape[0], 1, num_heads, -1).transpose(0, 2, 1, 3)


def _joined(x: mx.array) -> mx.array:
    """``[T, num_heads, 1, dim]`` -> ``[T, 1, num_heads * dim]``."""
    return x.reshape(x.shape[0], 1, -1)


def gemma2_attention(
    self: Any, x: mx.array, mask: Any = None, cache: PagedLayerCache | None = None
) -> mx.array:
    """Gemma 2: scores soft-capped in the kernel."""
    assert cache is not None
    queries = self.rope(_heads(self.q_proj(x), self.n_heads), offset=cache.offset)
    keys = self.rope(_heads(self.k_proj(x), self.n_kv_heads), offset=cache.offset)
    cache.update_and_fetch(keys, _heads(self.v_proj(x), self.n_kv_heads))
    out = cache.attend(queries, scale=self.scale, softcap=self.attn_logit_softcapping)
    return self.o_proj(_joined(out))


def plamo_attention(
    self: Any, hidden_states: mx.array, attention_mask: Any = None, cache: Any = None
) -> mx.array:
    """PLaMo: query head h reads KV head ``h % num_kv_heads``, so the heads are reordered."""
    queries = self.rotary_emb(
        _heads(self.q_proj(hidden_states), self.q_num_heads), offset=cache.offset
    )
    keys = self.rotary_emb(
        _heads(self.k_proj(hidden_states), self.k_num_heads), offset=cache.offset
    )
    cache.update_and_fetch(keys, _heads(self.v_proj(hidden_states), self.v_num_heads))
    num_rows, shared = queries.shape[0], self.config.n_shared_head

    def regrouped(x: mx.array, outer: int) -> mx.array:
        return (
            x.reshape(num_rows, outer, -1, 1, x.shape[-1])
            .swapaxes(1, 2)
            .reshape(num_rows, -1, 1, x.shape[-1])
        )

    out = cache.attend(regrouped(queries, shared), scale=self.scale)
    return self.o_proj(_joined(regrouped(out, self.k_num_heads)))


def llama4_attention(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
    """Llama 4: the temperature of its layers without RoPE, from an array of positions."""
    queries = _heads(self.q_proj(x), self.n_heads)
    keys = _heads(self.k_proj(x), self.n_kv_heads)
    positions = cache.offset
    if self.use_rope:
        queries, keys = self.rope(queries, offset=positions), self.rope(keys, offset=positions)
    if self.use_qk_norm:
        queries = mx.fast.rms_norm(queries, weight=None, eps=1e-6)
        keys = mx.fast.rms_norm(keys, weight=None, eps=1e-6)
    if self.attn_temperature_tuning and not self.use_rope:
        steps = mx.floor((positions + 1) / self.floor_scale)
        factors = mx.log(steps + 1.0) * self.attn_scale + 1.0
        queries = (queries * factors[:, None, None, None]).astype(queries.dtype)
    cache.update_and_fetch(keys, _heads(self.v_proj(x), self.n_kv_heads))
    return self.o_proj(_joined(cache.attend(queries, scale=self.scale)))


def llama4_model(self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
    """Llama 4: no masks, as each layer's plan knows its chunks."""
    h = self.embed_tokens(inputs)
    for layer, layer_cache in zip(self.layers, cache):
        h = layer(h, None, cache=layer_cache)
    return self.norm(h)


def mlx_vlm_llama4_model(
    self: Any,
    input_ids: mx.array,
    input_embeds: mx.array | None = None,
    mask: Any = None,
    cache: Any = None,
) -> mx.array:
    """Llama 4 of mlx-vlm: no masks, also for embeddings instead of tokens."""
    h = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
    for layer, layer_cache in zip(self.layers, cache):
        h = layer(h, None, cache=layer_cache)
    return self.norm(h)


def qwen3_omni_language_model(
    self: Any,
    inputs: mx.array,
    inputs_embeds: mx.array | None = None,
    cache: Any = None,
    position_ids: mx.array | None = None,
    visual_pos_masks: mx.array | None = None,
    deepstack_visual_embeds: Any = (),
) -> Any:
    """Qwen 3 Omni of mlx-vlm: without evaluating every fourth layer while it is built.

    Args:
        visual_pos_masks: ``[m, 1]``: the rows that each of `deepstack_visual_embeds` is added to.
    """
    from mlx_vlm.models.base import LanguageModelOutput

    model = self.model
    h = model.embed_tokens(inputs) if inputs_embeds is None else inputs_embeds
    rotary = model.layers[0].self_attn.rotary_emb
    turned = None if rotary.fused_apply else rotary(h, position_ids)
    for i, (layer, layer_cache) in enumerate(zip(model.layers, cache)):
        h = layer(h, None, layer_cache, position_ids, turned)
        if i < len(deepstack_visual_embeds):
            assert visual_pos_masks is not None
            added = deepstack_visual_embeds[i].astype(h.dtype)
            h = h.at[visual_pos_masks[:, 0], 0].add(added)
    h = model.norm(h)
    tied = self.args.tie_word_embeddings
    return LanguageModelOutput(logits=model.embed_tokens.as_linear(h) if tied else self.lm_head(h))


def mlx_vlm_mistral_model(
    self: Any, inputs: mx.array, cache: Any = None, inputs_embeds: mx.array | None = None
) -> mx.array:
    """Ministral 3 and Mistral 4 of mlx-vlm: the temperature of each row from its position.

    Theirs uses the first row's temperature for all rows, and reads it on the host.
    """
    h = self.embed_tokens(inputs) if inputs_embeds is None else inputs_embeds
    rope = self.config.rope_parameters
    steps = mx.floor(cache[0].offset / rope["original_max_position_embeddings"])
    scale = 1 + rope["llama_4_scaling_beta"] * mx.log(1 + steps)
    scale = scale[:, None, None, None].astype(h.dtype)
    for layer, layer_cache in zip(self.layers, cache):
        h = layer(h, scale, None, cache=layer_cache)
    return self.norm(h)


def gpt_bigcode_model(self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
    """GPT BigCode: learned positions, one for each row."""
    h = self.wte(inputs) + self.wpe(cache[0].offset[:, None])
    for layer, layer_cache in zip(self.h, cache):
        h = layer(h, None, cache=layer_cache)
    return self.ln_f(h)


def afm7_reusing_attention(
    self: Any, x: mx.array, keys: KVHandle, values: KVHandle, mask: Any = None
) -> mx.array:
    """AFM 7: layers without keys of their own take positions from the layer they attend to."""
    cache = keys.cache
    queries = self.q_norm(self.rope(_heads(self.q_proj(x), self.n_heads), offset=cache.offset))
    return self.out_proj(_joined(cache.attend(queries, scale=self.scale)))


def dynamic_rope(self: Any, x: mx.array, offset: mx.array) -> mx.array:
    """RoPE whose base grows with contexts beyond `context_limit`, and is constant below."""
    return mx.fast.rope(
        x, self.dims, traditional=self.traditional, base=self.base, scale=1.0, offset=offset
    )


def internlm3_rope(self: Any, x: mx.array, offset: mx.array) -> mx.array:
    """InternLM 3: RoPE whose base grows with contexts beyond `context_limit`."""
    return mx.fast.rope(
        x,
        self.dims,
        traditional=self.traditional,
        base=self.original_base,
        scale=self.scale,
        offset=offset,
    )


def su_scaled_rope(self: Any, x: mx.array, offset: mx.array) -> mx.array:
    """LongRoPE of mlx-vlm with the factors of contexts up to `context_limit`.

    mlx-vlm's applies the factors of the longest context of a batch to all of it.
    """
    turned = mx.fast.rope(
        self._short_scale.astype(x.dtype) * x[..., : self.dim],
        self.dim,
        traditional=False,
        base=None,
        scale=1.0,
        offset=offset,
        freqs=self._short_freqs,
    )
    return mx.concatenate([turned, x[..., self.dim :]], axis=-1)


_ADAPTED: dict[str, Callable[..., Any]] = {
    "afm7.KVReuseAttention": afm7_reusing_attention,
    "gemma2.Attention": gemma2_attention,
    "rope_utils.DynamicNTKScalingRoPE": dynamic_rope,
    "internlm3.DynamicNTKScalingRoPE": internlm3_rope,
    "gpt_bigcode.GPTBigCodeModel": gpt_bigcode_model,
    "llama4.Attention": llama4_attention,
    "llama4.LlamaModel": llama4_model,
    "mlx_vlm.llama4.Attention": llama4_attention,
    "mlx_vlm.llama4.LlamaModel": mlx_vlm_llama4_model,
    "mlx_vlm.mistral3.Ministral3": mlx_vlm_mistral_model,
    "mlx_vlm.mistral4.Mistral4Model": mlx_vlm_mistral_model,
    "mlx_vlm.qwen3_omni_moe.LanguageModel": qwen3_omni_language_model,
    "mlx_vlm.rope_utils.SuScaledRoPE": su_scaled_rope,
    "plamo.Attention": plamo_attention,
}


def adapt(model: nn.Module, context: StepContext, overrides: Overrides) -> None:
    """Replaces the forward of modules that need it while a step is built."""
    for module in model.modules():
        if isinstance(module, LongRoPE):
            overrides.replace(module, "__call__", _by_limit(type(module), context))
        adapted = _ADAPTED.get(_kind(module))
        if adapted is not None:
            overrides.replace(module, "__call__", _during_steps(type(module), adapted, context))


def context_limit(model: nn.Module) -> int | None:
    """Returns the tokens up to which RoPE is independent of the context; None means no limit.

    Dynamic scaling rotates keys by the context length at the time of writing, so past this limit
    mlx-lm's answers depend on how a prompt was cut. mlx-vlm's LongRoPE does the same; mlx-lm's
    always uses the factors of long contexts.
    """
    limits = []
    for module in model.modules():
        if _kind(module) == "rope_utils.DynamicNTKScalingRoPE":
            limits.append(module.max_position_embeddings)
        elif _kind(module) == "mlx_vlm.rope_utils.SuScaledRoPE":
            limits.append(module.original_max_position_embeddings)
        elif _kind(module) == "internlm3.Attention" and _kind(module.rope):
            # The module mistakes the number of heads for the number of tokens.
            limits.append(module.rope.max_position_embeddings - module.n_heads)
    return min(limits, default=None)


def _kind(module: nn.Module) -> str:
    """Returns module and class of mlx-lm, without the package; empty for other packages.

    For mlx-vlm: "mlx_vlm", the family's package (or a shared module), and the class.
    """
    package, _, name = type(module).__module__.rpartition(".")
    if package == "mlx_lm.models":
        return f"{name}.{type(module).__qualname__}"
    if package == "mlx_vlm.models":
        return f"mlx_vlm.{name}.{type(module).__qualname__}"
    if package.startswith("mlx_vlm.models."):
        return f"mlx_vlm.{package.split('.')[2]}.{type(module).__qualname__}"
    return ""


def _by_limit(kind: Any, context: StepContext) -> Callable[..., Any]:
    """LongRoPE with the factors of short contexts, for an engine without longer ones."""

    def call(self: Any, x: mx.array, offset: Any = 0) -> Any:
        longest = context.limit.longest
        is_short = context.active and longest is not None and longest <= self.original
        return self.rotate_short(x, offset) if is_short else kind.__call__(self, x, offset)

    return call


def _during_steps(
    kind: type, adapted: Callable[..., Any], context: StepContext
) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        forward = adapted if context.active else kind.__call__
        return forward(self, *args, **kwargs)

    return call
