"""Model code runs the native operations while a paged step is built; no other code does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import activations, llama, qwen3
from native.test_layer_ops import DTYPES, TOLERANCE, assert_close
from support.models import StepDriver, tiny_config, tiny_model

from mlx_paged import ops
from mlx_paged.model import patches
from mlx_paged.model.overrides import Overrides
from mlx_paged.model.patches import native_ops


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    patches.install()
    yield
    patches.install()


@pytest.fixture
def calls(monkeypatch) -> dict[str, int]:
    """How often each native operation is built."""
    counts: dict[str, int] = {}

    def count(name: str) -> None:
        native = getattr(ops, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return native(*args, **kwargs)

        monkeypatch.setattr(ops, name, counting)

    for name in ("rope_rotations", "rope", "rms_norm", "silu_mul", "linear"):
        count(name)
    return counts


def test_a_step_of_a_model_uses_them_and_its_rotations_once(calls) -> None:
    config = tiny_config("llama")
    model = tiny_model(config)
    layers = len(model.model.layers)
    driver = StepDriver(model, "llama", block_size=8)
    calls.clear()
    driver.step({"a": [1, 2, 3]})
    assert calls == {
        "rope_rotations": 1,
        "rope": 2 * layers,
        "rms_norm": 2 * layers + 1,
        "silu_mul": layers,
        "linear": 7 * layers + 1,  # tied embeddings are the last
    }


def test_dense_calls_and_training_do_not_see_them(calls) -> None:
    config = tiny_config("llama")
    model = tiny_model(config)
    driver = StepDriver(model, "llama", block_size=8)
    driver.step({"a": [1, 2, 3]})
    calls.clear()
    tokens = mx.array([[3, 1, 4, 1, 5]])
    model(tokens)
    loss, gradients = nn.value_and_grad(model, lambda m: m(tokens).square().mean())(model)
    mx.eval(loss, gradients)
    assert not calls


def test_another_thread_does_not_see_them(calls) -> None:
    x = mx.ones((2, 8))
    mx.eval(x)
    with native_ops(mx.arange(2)):
        thread = threading.Thread(target=lambda: mx.fast.rms_norm(x, None, 1e-5))
        thread.start()
        thread.join()
        assert not calls
        mx.fast.rms_norm(x, None, 1e-5)
    assert calls == {"rms_norm": 1}


def test_a_function_compiled_within_a_step_still_has_a_gradient(calls) -> None:
    """MLX keeps its trace, with the native operations in it, and traces anew for a gradient."""
    x = mx.random.normal((2, 8), key=mx.random.key(1))
    compiled = mx.compile(lambda x: mx.fast.rms_norm(x, None, 1e-5)[:, :4].sum())
    with native_ops(mx.arange(2)):
        mx.eval(compiled(x))
    assert calls == {"rms_norm": 1}
    expected = mx.grad(lambda x: patches._mlx_rms_norm(x, None, 1e-5)[:, :4].sum())(x)
    assert mx.allclose(mx.grad(compiled)(x), expected)


def test_a_step_that_raises_leaves_nothing_behind(calls) -> None:
    with pytest.raises(RuntimeError, match="mine"), native_ops(mx.arange(2)):
        raise RuntimeError("mine")
    mx.fast.rms_norm(mx.ones((2, 8)), None, 1e-5)
    assert not calls


X = mx.random.normal((3, 2, 1, 16), key=mx.random.key(0))
ROPE_CALLS: dict[str, dict[str, Any]] = {
    "base": {"base": 10000.0},
    "another base": {"base": 500.0},
    "scale": {"base": 10000.0, "scale": 0.25},
    "traditional": {"base": 10000.0, "traditional": True},
    "part of the dims": {"base": 10000.0, "dims": 8},
    "freqs": {"base": None, "freqs": mx.arange(1.0, 9.0) ** 2},
}


@pytest.mark.parametrize("name", ROPE_CALLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_equals_mlx(calls, name: str, dtype) -> None:
    options = {"dims": 16, "traditional": False, "scale": 1.0, **ROPE_CALLS[name]}
    positions = mx.array([4001, 0, 17], dtype=mx.int32)
    x = X.astype(dtype)
    expected = patches._mlx_rope(x, offset=positions, **options)
    with native_ops(positions):
        got = [mx.fast.rope(x, offset=positions, **options) for _ in range(2)]
    assert calls == {"rope_rotations": 1, "rope": 2}
    for array in got:
        assert_close(
            array, np.array(expected.astype(mx.float32)).astype(np.float64), TOLERANCE[dtype]
        )


OTHER_ROPE_CALLS: dict[str, Callable[[mx.array], dict[str, Any]]] = {
    "a number": lambda positions: {"offset": 7},
    "other positions": lambda positions: {"offset": positions + 1},
    "a sequence": lambda positions: {"a": X.reshape(1, 2, 3, 16), "offset": 0},
    "rows of several tokens": lambda positions: {"a": mx.ones((3, 2, 4, 16)), "offset": positions},
    "three axes": lambda positions: {"a": X.squeeze(2), "offset": 0},
    "an explicit stream": lambda positions: {"offset": positions, "stream": mx.cpu},
}


@pytest.mark.parametrize("name", OTHER_ROPE_CALLS)
def test_any_other_rope_is_mlxs(calls, name: str) -> None:
    positions = mx.array([5, 0, 17], dtype=mx.int32)
    given = {"a": X, "dims": 16, "traditional": False, "base": 10000.0, "scale": 1.0}
    given = {**given, **OTHER_ROPE_CALLS[name](positions)}
    expected = np.array(patches._mlx_rope(**given))
    with native_ops(positions):
        assert np.array_equal(np.array(mx.fast.rope(**given)), expected)
    assert not calls


@pytest.mark.parametrize("options", [{"base": 1e4}, {"freqs": True, "base": None, "scale": 0.5}])
@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rope_that_mlx_cannot_start_on_cuda(monkeypatch, dtype, traditional, options) -> None:
    """MLX's kernel would have blocks of (8, 1, 128) threads: 64 is the most in z."""
    given = {"scale": 1.0, "traditional": traditional, **options}
    if "freqs" in given:
        given["freqs"] = mx.random.uniform(1, 100, (8,))
    x = mx.random.normal((43, 9, 1, 24)).astype(dtype)  # 3 groups of heads: 129 of z
    positions = mx.random.randint(0, 3000, (43,))
    expected = patches._mlx_rope(x, 16, offset=positions, **given)
    started = []
    plain = patches._mlx_rope

    def counting(a: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        started.append(a.shape)
        return plain(a, *args, **kwargs)

    monkeypatch.setattr(patches, "_mlx_rope", counting)
    monkeypatch.setattr(patches._building, "on_cuda", True)
    exact = np.array(expected.astype(mx.float32)).astype(np.float64)
    assert_close(mx.fast.rope(x, 16, offset=positions, **given), exact, TOLERANCE[dtype])
    assert not started
    mx.fast.rope(x[:42], 16, offset=positions[:42], **given)  # 126
    assert started == [(42, 9, 1, 24)], "what it can start is MLX's"


def test_ropes_of_one_step_do_not_share_what_differs(calls) -> None:
    """Two layers may differ in nothing but the scale, the base or the frequencies."""
    positions = mx.array([4001, 0, 17], dtype=mx.int32)
    given = {"dims": 16, "traditional": False}
    kinds: list[dict[str, Any]] = [
        {"base": base, "scale": scale} for base in (10000.0, 500.0) for scale in (1.0, 0.25)
    ]
    kinds += [{"base": None, "scale": 1.0, "freqs": mx.arange(1.0, 9.0) * n} for n in (1, 3)]
    expected = [patches._mlx_rope(X, offset=positions, **given, **kind) for kind in kinds]
    with native_ops(positions):
        got = [mx.fast.rope(X, offset=positions, **given, **kind) for kind in kinds * 2]
        # An array of frequencies that is gone must not be taken for another one at its place.
        for n in range(2, 12):
            freqs = mx.arange(1.0, 9.0) * n
            want = patches._mlx_rope(
                X, offset=positions, base=None, scale=1.0, freqs=freqs, **given
            )
            have = mx.fast.rope(X, offset=positions, base=None, scale=1.0, freqs=freqs, **given)
            assert_close(have, np.array(want).astype(np.float64), TOLERANCE[mx.float32])
            del freqs
    assert calls["rope_rotations"] == len(kinds) + 10
    for have, want in zip(got, expected * 2):
        assert_close(have, np.array(want).astype(np.float64), TOLERANCE[mx.float32])


def test_with_cuda_a_quantized_layer_sees_one_matrix_within_a_step_only(monkeypatch) -> None:
    layer = nn.QuantizedLinear(64, 8, group_size=32)
    shapes: list[tuple[int, ...]] = []
    multiply = patches._mlx_quantized_linear

    def seen(self: nn.Module, x: mx.array) -> mx.array:
        shapes.append(x.shape)
        return multiply(self, x)

    monkeypatch.setattr(patches, "_mlx_quantized_linear", seen)
    monkeypatch.setattr(ops, "has_cuda", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    x = mx.ones((3, 1, 64))
    with native_ops(mx.arange(3)):
        inside = layer(x)
    assert inside.shape == layer(x).shape == (3, 1, 8)
    assert shapes == [(3, 64), (3, 1, 64)]


def test_a_module_that_was_replaced_twice_is_itself_again() -> None:
    module = nn.Linear(4, 4)
    overrides = Overrides()
    for n in (1, 2):
        overrides.replace(module, "__call__", lambda self, x, n=n: n)
    assert module(mx.ones(4)) == 2
    overrides.undo()
    assert type(module) is nn.Linear
    overrides.undo()  # nothing is left to undo
    assert type(module) is nn.Linear


def test_mixed_dtypes_are_mlxs(calls) -> None:
    x, weight = mx.ones((3, 8), mx.float16), mx.ones((8,))
    with native_ops(mx.arange(3)):
        assert mx.fast.rms_norm(x, weight, 1e-5).dtype == mx.float32
        assert activations.swiglu(x, mx.ones((3, 8))).dtype == mx.float32
        assert activations.swiglu(x, mx.ones((3, 1), mx.float16)).shape == (3, 8)
    assert not calls


def test_uninstalling_restores_every_name() -> None:
    names = [(mx.fast, "rope"), (mx.fast, "rms_norm"), (nn.Linear, "__call__")]
    names += [(module, "swiglu") for module in (activations, llama, qwen3)]
    ours = [patches.rope, patches.rms_norm, patches.linear, *[patches.swiglu] * 3]
    assert [getattr(*name) for name in names] == ours
    patches.install()
    patches.uninstall()
    assert not any(getattr(*name) is own for name, own in zip(names, ours))
    patches.install()
    assert [getattr(*name) for name in names] == ours
