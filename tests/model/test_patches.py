"""The attention patch: dense calls stay MLX's, handles are served, all else is an error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.models import StepDriver, tiny_config, tiny_model

# isort: split
import mlx.core as mx
import numpy as np
from mlx_lm.models import base

from mlx_paged.model import patches
from mlx_paged.model.caches import KVHandle, LatentLayerCache, PagedLayerCache, Step, StepContext
from mlx_paged.model.layout import LayerSpec
from mlx_paged.model.plan import build_plan

MLX_ATTENTION = patches._mlx_attention
SCALE = 0.25


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    patches.install()
    yield
    patches.install()


@pytest.fixture
def context() -> StepContext:
    return StepContext()


@pytest.fixture
def cache(context: StepContext) -> PagedLayerCache:
    """A layer in a step of three rows: two of one sequence, one of another."""
    plan = build_plan([[2], [1]], [2, 1], [2, 1], block_size=8)
    context.enter(Step(plan, mx.array([1, 2], dtype=mx.int32)))
    spec = LayerSpec(num_kv_heads=2, key_dim=16, value_dim=16, dtype=mx.float32)
    return PagedLayerCache(context, spec, num_blocks=4, block_size=8)


def random_heads(num_heads: int, num_rows: int = 3, seed: int = 0) -> mx.array:
    return mx.random.normal((num_rows, num_heads, 1, 16), key=mx.random.key(seed))


def handles(cache: PagedLayerCache) -> tuple[KVHandle, KVHandle]:
    return cache.update_and_fetch(random_heads(2, seed=1), random_heads(2, seed=2))


def attention(*args: Any, **kwargs: Any) -> mx.array:
    """Looked up at every call, as mlx-lm's model code does."""
    return mx.fast.scaled_dot_product_attention(*args, **kwargs)


# --- Installing -----------------------------------------------------------------------------------


def test_installing_twice_changes_nothing_and_uninstalling_restores() -> None:
    patches.install()
    assert mx.fast.scaled_dot_product_attention is patches.scaled_dot_product_attention
    patches.uninstall()
    assert mx.fast.scaled_dot_product_attention is MLX_ATTENTION
    patches.uninstall()
    assert mx.fast.scaled_dot_product_attention is MLX_ATTENTION


def test_swiglu_of_mlx_vlm_is_native_too() -> None:
    """On the CPU its compiled form took a fifth of a decode step of the embedded vision model."""
    pytest.importorskip("support.vlm", reason="mlx-vlm is not installed: make test installs it")
    from mlx_lm.models import activations, llama
    from mlx_vlm.models import activations as of_vlm
    from mlx_vlm.models import mlp

    patches.uninstall()
    theirs, of_lm = mlp.swiglu, llama.swiglu
    assert theirs is of_vlm.swiglu is not of_lm is activations.swiglu
    patches.install()
    assert all(m.swiglu is patches.swiglu for m in (mlp, of_vlm, llama, activations))
    patches.install()
    patches.uninstall()
    assert mlp.swiglu is of_vlm.swiglu is theirs and llama.swiglu is activations.swiglu is of_lm


def test_what_it_wraps_is_mlx_itself() -> None:
    assert MLX_ATTENTION is not patches.scaled_dot_product_attention
    assert type(MLX_ATTENTION) is type(mx.add)


def test_mlx_lm_reaches_it_through_its_base_module() -> None:
    assert base.mx.fast.scaled_dot_product_attention is patches.scaled_dot_product_attention


# --- Dense calls ----------------------------------------------------------------------------------

DENSE_CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": "causal"},
    "no mask": {"mask": None},
    "boolean mask": {"mask": mx.tril(mx.ones((8, 8), dtype=mx.bool_))},
    "additive mask": {"mask": mx.random.normal((8, 8), key=mx.random.key(9))},
    "sinks": {"sinks": mx.array([0.5, -1.0, 2.0, 0.0])},
    "stream": {"stream": mx.cpu},
}


@pytest.mark.parametrize("name", DENSE_CALLS)
def test_dense_calls_are_bitwise_those_of_mlx(name: str) -> None:
    q, k, v = (
        mx.random.normal((2, heads, 8, 16), key=mx.random.key(heads + i))
        for i, heads in enumerate((4, 2, 2))
    )
    ours = np.array(attention(q, k, v, scale=SCALE, **DENSE_CALLS[name]))
    assert np.array_equal(ours, np.array(MLX_ATTENTION(q, k, v, scale=SCALE, **DENSE_CALLS[name])))


def test_dense_calls_keep_mlx_errors() -> None:
    x = mx.zeros((1, 1, 1, 16))
    with pytest.raises(TypeError):
        attention(x, x, x, scale=SCALE, no_such_argument=1)
    with pytest.raises(ValueError):
        attention(x, mx.zeros((1, 1, 1, 8)), x, scale=SCALE)


def test_a_model_that_belongs_to_a_runner_still_answers_densely() -> None:
    config = tiny_config("llama")
    tokens = mx.array([[3, 1, 4, 1, 5]])
    patches.uninstall()
    expected = np.array(tiny_model(config)(tokens))
    model = tiny_model(config)
    StepDriver(model, "llama", block_size=8).step({"a": [1, 2, 3]})
    assert np.array_equal(np.array(model(tokens)), expected)


# --- Handles --------------------------------------------------------------------------------------


def test_handles_are_attended_through_the_plan(cache: PagedLayerCache) -> None:
    k, v = handles(cache)
    queries = random_heads(4)
    got = np.array(attention(queries, k, v, scale=SCALE))
    # Densely: rows 0 and 1 are one causal sequence, row 2 is alone.
    keys, values = random_heads(2, seed=1), random_heads(2, seed=2)

    def dense(rows: slice) -> np.ndarray:
        q, k, v = (x[rows].transpose(2, 1, 0, 3) for x in (queries, keys, values))
        return np.array(MLX_ATTENTION(q, k, v, scale=SCALE, mask="causal").transpose(2, 1, 0, 3))

    assert np.allclose(got, np.concatenate([dense(slice(0, 2)), dense(slice(2, 3))]), atol=1e-6)


def test_model_code_reaches_the_handles_through_mlx_lm(cache: PagedLayerCache) -> None:
    k, v = handles(cache)
    queries = random_heads(4)
    got = base.scaled_dot_product_attention(queries, k, v, cache=cache, scale=SCALE, mask=None)
    assert np.array_equal(np.array(got), np.array(attention(queries, k, v, scale=SCALE)))


def test_sinks_reach_the_kernel(cache: PagedLayerCache) -> None:
    k, v = handles(cache)
    queries, sinks = random_heads(4), mx.array([4.0, 4.0, 4.0, 4.0])
    with_sinks = np.array(attention(queries, k, v, scale=SCALE, sinks=sinks))
    without = np.array(attention(queries, k, v, scale=SCALE))
    assert np.abs(with_sinks).sum() < 0.5 * np.abs(without).sum()


@pytest.mark.parametrize(
    "mask",
    ["causal", mx.zeros((1, 1)), mx.ones((1, 1), dtype=mx.bool_)],
    ids=["str", "add", "bool"],
)
def test_a_mask_is_refused(cache: PagedLayerCache, mask: Any) -> None:
    k, v = handles(cache)
    with pytest.raises(TypeError, match=r"\[paged_attention\] mask must be None"):
        attention(random_heads(4), k, v, scale=SCALE, mask=mask)


def test_unknown_arguments_are_refused_by_name(cache: PagedLayerCache) -> None:
    k, v = handles(cache)
    with pytest.raises(TypeError, match="softcap"):
        attention(random_heads(4), k, v, scale=SCALE, softcap=30.0)


def test_values_must_be_the_handle_that_came_with_the_keys(
    cache: PagedLayerCache, context: StepContext
) -> None:
    k, v = handles(cache)
    other = PagedLayerCache(context, cache.spec, num_blocks=4, block_size=8)
    for values in (random_heads(2), handles(other)[1], mx.zeros((0,))):
        with pytest.raises(TypeError, match="two handles of one layer"):
            attention(random_heads(4), k, values, scale=SCALE)
    with pytest.raises((TypeError, ValueError)):
        attention(random_heads(4), random_heads(2), v, scale=SCALE)


def test_keys_and_values_are_not_interchangeable(cache: PagedLayerCache) -> None:
    """A layer whose keys serve as its values passes one handle twice; the pools are still two."""
    k, v = handles(cache)
    for keys, values in ((v, k), (k, k), (v, v)):
        with pytest.raises(TypeError):
            attention(random_heads(4), keys, values, scale=SCALE)


DENSE_USES: dict[str, Callable[[KVHandle], Any]] = {
    "matmul": lambda h: random_heads(4) @ h,
    "matmul from the left": lambda h: h @ random_heads(4),
    "matmul with other axes swapped": lambda h: random_heads(4) @ h.swapaxes(1, 2),
    "softmax of scores": lambda h: (
        mx.softmax(random_heads(4) @ h.swapaxes(-1, -2), axis=-1) @ random_heads(4)
    ),
    "add": lambda h: h + random_heads(2),
    "add from the right": lambda h: random_heads(2) + h,
    "reshape": lambda h: h.reshape(3, 2, 16),
    "transpose": lambda h: h.transpose(0, 2, 1, 3),
    "concatenate": lambda h: mx.concatenate([h, random_heads(2)], axis=2),
    "repeat": lambda h: mx.repeat(h, 2, axis=1),
    "index": lambda h: h[0],
    "slice": lambda h: h[:, :, -4:],
    "shape": lambda h: (h.shape[2], h.shape[0]),
    "rope": lambda h: mx.fast.rope(
        h, 16, traditional=False, base=1e4, scale=1.0, offset=0
    ),
    "as queries": lambda h: attention(h, random_heads(2), random_heads(2), scale=SCALE),
}  # fmt: skip


@pytest.mark.parametrize("use", DENSE_USES)
def test_a_handle_used_as_dense_data_is_loud(cache: PagedLayerCache, use: str) -> None:
    for handle in handles(cache):
        with pytest.raises((TypeError, ValueError, IndexError, RuntimeError)):
            result = DENSE_USES[use](handle)
            mx.eval(result)


@pytest.mark.parametrize(
    "use",
    [
        lambda h: h * 2.0,
        lambda h: mx.softmax(h, axis=-1),
        lambda h: mx.fast.rms_norm(h, None, 1e-5),
    ],
    ids=["multiply", "softmax", "norm"],
)
def test_a_handle_changed_elementwise_is_empty_and_cannot_be_attended(
    cache: PagedLayerCache, use: Callable[[KVHandle], mx.array]
) -> None:
    k, v = (use(h) for h in handles(cache))
    assert k.size == 0
    with pytest.raises((TypeError, ValueError)):
        mx.eval(attention(random_heads(4), k, v, scale=SCALE))
    with pytest.raises((TypeError, ValueError)):
        mx.eval(random_heads(4) @ k)


def test_a_cast_leaves_the_handle_as_it_is(cache: PagedLayerCache) -> None:
    """Model code upcasts keys before attention; the kernels accumulate in float32 anyway."""
    k, v = handles(cache)
    assert k.astype(mx.float32) is k and v.astype(mx.float16) is v
    queries = random_heads(4).astype(mx.float16)
    got = attention(queries, k.astype(mx.float16), v, scale=SCALE)
    assert got.dtype == mx.float16
    assert np.allclose(got, attention(random_heads(4), k, v, scale=SCALE), atol=5e-3)


def test_a_handle_cannot_be_changed_in_place(cache: PagedLayerCache) -> None:
    """Broadcasting over its empty shape would leave it a valid handle, and the change undone."""
    for handle in handles(cache):
        with pytest.raises(TypeError, match="cannot be changed"):
            handle += 1.0
        with pytest.raises(TypeError, match="cannot be changed"):
            handle *= 2.0


# --- Latent attention -----------------------------------------------------------------------------


@pytest.fixture
def latents(context: StepContext) -> LatentLayerCache:
    """A latent layer in a step of three rows: two of one sequence, one of another."""
    plan = build_plan([[2], [1]], [2, 1], [2, 1], block_size=8)
    context.enter(Step(plan, mx.array([1, 2], dtype=mx.int32)))
    spec = LayerSpec(num_kv_heads=1, key_dim=24, value_dim=16, dtype=mx.float32, latent=True)
    return LatentLayerCache(context, spec, num_blocks=4, block_size=8)


def test_latent_attention_is_that_of_latents_and_rotary_keys(latents: LatentLayerCache) -> None:
    latent, rotary = random_heads(1, seed=1), random_heads(1, seed=2)[..., :8]
    q_latent, q_rotary = random_heads(4, seed=3), random_heads(4, seed=4)[..., :8]
    k, v = latents.update_and_fetch(latent, rotary)
    scores = (q_rotary * SCALE) @ v.swapaxes(-1, -2)
    got = attention(q_latent, k, k, scale=SCALE, mask=scores)

    def dense(rows: slice) -> mx.array:
        keys, values, rope = (x[rows].transpose(2, 1, 0, 3) for x in (latent, latent, rotary))
        q, q_rope = (x[rows].transpose(2, 1, 0, 3) for x in (q_latent, q_rotary))
        length = q.shape[2]
        causal = mx.where(mx.tri(length), 0.0, -mx.inf)
        mask = SCALE * (q_rope @ rope.swapaxes(-1, -2)) + causal
        return MLX_ATTENTION(q, keys, values, scale=SCALE, mask=mask).transpose(2, 1, 0, 3)

    expected = mx.concatenate([dense(slice(0, 2)), dense(slice(2, 3))])
    assert np.allclose(got, expected, atol=1e-6)


def test_latent_attention_without_its_scores_is_loud(latents: LatentLayerCache) -> None:
    k, v = latents.update_and_fetch(random_heads(1), random_heads(1)[..., :8])
    with pytest.raises(TypeError, match="rotary scores"):
        attention(random_heads(4), k, v, scale=SCALE)
    other = v.swapaxes(-1, -2).__rmatmul__(random_heads(4)[..., :8])
    with pytest.raises(TypeError, match="two handles of one layer"):
        attention(random_heads(4), k, v, scale=SCALE, mask=other)


def test_scores_are_taken_by_latent_layers_only(
    cache: PagedLayerCache, latents: LatentLayerCache
) -> None:
    k, v = handles(cache)
    scores = random_heads(4) @ v.swapaxes(-1, -2)
    with pytest.raises(TypeError, match="not latents"):
        attention(random_heads(4), k, k, scale=SCALE, mask=scores)
    with pytest.raises(TypeError, match="two handles of one layer"):
        attention(random_heads(4), latents.keys, latents.keys, scale=SCALE, mask=scores)


# --- Steps ----------------------------------------------------------------------------------------


def test_a_cache_means_nothing_outside_of_a_step(
    cache: PagedLayerCache, context: StepContext
) -> None:
    k, v = handles(cache)
    context.leave()
    assert not context.active
    for use in (
        lambda: cache.offset,
        lambda: handles(cache),
        lambda: attention(random_heads(4), k, v, scale=SCALE),
        lambda: context.step,
    ):
        with pytest.raises(RuntimeError, match="outside of a step"):
            use()


def test_a_paged_cache_in_a_dense_call_of_the_model_is_loud() -> None:
    model = tiny_model(tiny_config("llama"))
    driver = StepDriver(model, "llama", block_size=8)
    with pytest.raises(RuntimeError, match="outside of a step"):
        mx.eval(model(mx.array([[1, 2, 3]]), cache=driver.runner.model.caches))


def test_a_failing_forward_leaves_no_step_behind() -> None:
    model = tiny_model(tiny_config("llama"))
    driver = StepDriver(model, "llama", block_size=8)
    context = driver.runner.model._context
    attend = type(model.layers[1].self_attn)
    broken = type("Broken", (attend,), {"__call__": lambda *args, **kwargs: 1 / 0})
    model.layers[1].self_attn.__class__ = broken
    with pytest.raises(ZeroDivisionError):
        driver.step({"a": [1, 2]})
    assert not context.active


def test_the_mask_is_made_by_nobody(cache: PagedLayerCache) -> None:
    assert cache.make_mask(3) is None
    assert cache.make_mask(1, window_size=8, return_array=True) is None
    assert base.create_attention_mask(random_heads(4)[:, 0], cache) is None


def test_modules_that_are_imported_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, or by what a collection runs, while the list of them is made."""

    class Growing(dict[str, Any]):
        def items(self) -> Any:
            for i, item in enumerate(super().items()):
                self.setdefault(f"imported.meanwhile{i}", patches)
                yield item

    monkeypatch.setattr(patches, "sys", SimpleNamespace(modules=Growing(sys.modules)))
    patches.install()
