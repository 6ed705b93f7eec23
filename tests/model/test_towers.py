"""Native forms of what towers compute: as MLX has them, and used where they serve."""

from __future__ import annotations

from typing import Any

import mlx_paged  # noqa: F401  before mlx.core, so that its BLAS takes effect

# isort: split
import mlx.core as mx
import mlx.nn as nn
import pytest
from support.reference import ON_GPU

from mlx_paged import ops
from mlx_paged.model import patches, towers

pytestmark = pytest.mark.skipif(ON_GPU, reason="towers are MLX's own on a GPU")


@pytest.fixture(autouse=True)
def installed() -> None:
    patches.install()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each attention call in a tower, True if it was native."""
    found: list[bool] = []
    original = towers.TowerOps.attend

    def watched(*args: Any) -> Any:
        out = original(*args)
        found.append(out is not None)
        return out

    monkeypatch.setattr(towers.TowerOps, "attend", watched)
    gelu = ops.gelu

    def watched_gelu(*args: Any) -> Any:
        found.append(True)
        return gelu(*args)

    monkeypatch.setattr(ops, "gelu", watched_gelu)
    return found


def attention(q: mx.array, k: mx.array, v: mx.array, **more: Any) -> mx.array:
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, **more)


def heads(batch: int, count: int, rows: int, width: int, seed: int) -> mx.array:
    """As models have them: a view of ``[batch, rows, heads, width]``."""
    key = mx.random.key(seed)
    return mx.random.normal((batch, rows, count, width), key=key).transpose(0, 2, 1, 3)


@pytest.mark.parametrize(
    ("batch", "count", "kv_heads", "rows", "width"),
    [
        (1, 3, 3, 256, 64),
        (3, 4, 4, 65, 72),
        (2, 4, 2, 40, 20),
        (1, 2, 1, 129, 80),
        (2, 1, 1, 16, 8),
    ],
)
def test_attention_is_that_of_mlx(
    served: list[bool], batch: int, count: int, kv_heads: int, rows: int, width: int
) -> None:
    q = heads(batch, count, rows, width, 0)
    k, v = (heads(batch, kv_heads, rows, width, i) for i in (1, 2))
    expected = attention(q, k, v)
    with patches.native_tower():
        for more in ({}, {"mask": None}):
            found = attention(q, k, v, **more)
            assert found.shape == expected.shape and found.dtype == expected.dtype
            assert mx.abs(found - expected).max().item() < 1e-5
    assert served == [True, True]


def test_other_attention_is_left_to_mlx(served: list[bool]) -> None:
    q, k, v = (heads(1, 2, 32, 16, i) for i in range(3))
    few = heads(1, 2, 20, 16, 3)
    mask = mx.random.uniform(shape=(32, 32), key=mx.random.key(4)) < 0.5
    half = [a.astype(mx.float16) for a in (q, k, v)]
    calls: list[tuple[list[mx.array], dict[str, Any]]] = [
        ([q, k, v], {"mask": mask}),
        ([q, k, v], {"mask": "causal"}),
        ([q, few, few], {}),
        (half, {}),
        ([a[:, :, :15] for a in (q, k, v)], {}),
    ]
    expected = [attention(*arrays, **more) for arrays, more in calls]
    with patches.native_tower():
        found = [attention(*arrays, **more) for arrays, more in calls]
    assert served == [False] * len(calls)
    assert all(mx.array_equal(a, b).item() for a, b in zip(found, expected))


@pytest.mark.parametrize("kind", ["precise", "tanh", "fast", "none"])
def test_gelu_is_that_of_mlx(served: list[bool], kind: str) -> None:
    edges = mx.array([0.0, -0.0, 1e-9, 30, -30, 100, -100, 1e4, -1e4])
    x = mx.concatenate([6 * mx.random.normal((500,), key=mx.random.key(0)), edges])
    layer = nn.GELU(approx=kind)
    expected = layer(x)
    with patches.native_tower():
        found = layer(x)
        half = layer(x.astype(mx.float16))
    assert mx.allclose(found, expected, rtol=1e-6, atol=2e-6).item()
    assert half.dtype == mx.float16
    assert served == [True], "of the one in float32"


def test_it_ends_with_the_tower_also_where_that_fails(served: list[bool]) -> None:
    q, k, v = (heads(1, 2, 32, 16, i) for i in range(3))
    with pytest.raises(ValueError, match="no picture"), patches.native_tower():
        raise ValueError("no picture")
    attention(q, k, v)
    nn.GELU()(q)
    assert served == []


def test_towers_run_natively(served: list[bool]) -> None:
    pytest.importorskip("support.vlm", reason="mlx-vlm is not installed: make test installs it")
    from support.media_cases import vary
    from support.media_models import CASES
    from support.media_parity import paged

    case = CASES["qwen2_5_vl"]()
    vary(case.model)
    mx.eval(paged(case).encode(case.picture(1).inputs()).arrays())
    case = CASES["smolvlm"]()
    vary(case.model)
    mx.eval(paged(case).encode(case.picture(1).inputs()).arrays())
    assert served.count(True) >= 2
