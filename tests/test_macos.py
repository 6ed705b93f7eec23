"""The limit of the GPU's memory on a Mac: what is said about it, and where."""

from __future__ import annotations

import sys
from typing import Any

from support.hash_model import hash_model
from support.platforms import platform_with

# isort: split
import pytest

from mlx_paged import LLM, macos
from mlx_paged.engine import memory
from mlx_paged.engine.config import EngineConfig
from mlx_paged.engine.kv_cache_config import KVCacheConfig
from mlx_paged.errors import InvalidParameterError, ModelLoadError, OutOfMemoryError
from mlx_paged.model import loader

GIB = 1 << 30
ADVICE = "this Mac's GPU may use little"


@pytest.mark.parametrize(
    ("memory_gib", "limit_mb", "usable", "most"),
    [
        (8, 0, 8 * 2 / 3, 4),
        (16, 0, 16 * 2 / 3, 12),
        (16, 14336, 14, 12),
        (36, 0, 24, 31.5),
        (64, 0, 48, 56),
        (128, 0, 96, 112),
        (128, 999999, 128, 112),
    ],
)
def test_the_limit_and_how_far_it_may_go(memory_gib, limit_mb, usable, most) -> None:
    assert macos.gpu_bytes(memory_gib * GIB, limit_mb) == int(usable * GIB)
    assert macos.max_gpu_bytes(memory_gib * GIB) == most * GIB


def test_the_advice_names_limit_command_and_rest() -> None:
    assert macos.limit_advice(16 * GIB, 0) == (
        "this Mac's GPU may use 10.7 GiB of 16.0 GiB (iogpu.wired_limit_mb is 0, the default); "
        "'sudo sysctl iogpu.wired_limit_mb=12288' raises that to 12.0 GiB until the next restart "
        "and leaves 4.0 GiB to the system"
    )
    for memory_gib, limit_mb in ((8, 0), (16, 12288), (128, 120000)):
        advice = macos.limit_advice(memory_gib * GIB, limit_mb)
        assert advice.endswith(", and the system needs the rest") and "sudo" not in advice


def test_the_advice_of_this_machine(monkeypatch) -> None:
    values = {"hw.memsize": 16 * GIB, macos.WIRED_LIMIT: 0}
    monkeypatch.setattr(macos, "sysctl_integer", values.__getitem__)
    monkeypatch.setattr(sys, "platform", "linux")
    assert macos.limit_advice_here() == ""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert macos.limit_advice_here() == macos.limit_advice(16 * GIB, 0)

    def missing(_: str) -> int:
        raise OSError("unknown")

    monkeypatch.setattr(macos, "sysctl_integer", missing)
    assert macos.limit_advice_here() == ""


# --- Errors ---------------------------------------------------------------------------------------


@pytest.fixture
def on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(macos, "limit_advice_here", lambda: ADVICE)


@pytest.mark.parametrize("on_cpu", [False, True], ids=["gpu", "cpu"])
def test_too_little_memory_for_a_pool(on_a_mac, on_cpu) -> None:
    """The CPU has no such limit."""
    engine = LLM(hash_model(), num_gpu_blocks_override=8).engine
    runner = engine._runner
    runner.model.platform = platform_with(on_cpu=on_cpu)
    config = EngineConfig(kv_cache_memory=100)
    kv_config = KVCacheConfig(runner.model.layout, config, None)
    with pytest.raises(InvalidParameterError, match=r"kv_cache_memory must be .*but got 100") as no:
        memory.allocate_pools(runner, kv_config, config, None)
    assert (ADVICE in str(no.value)) == (not on_cpu) and no.value.field == "kv_cache_memory"


def test_a_pool_that_cannot_be_allocated(on_a_mac) -> None:
    def allocate(num_blocks: int) -> None:
        raise RuntimeError("[metal::malloc] Attempting to allocate 9 bytes which is too much")

    with pytest.raises(
        OutOfMemoryError, match=r"pool of 8 blocks does not fit.*Attempting"
    ) as found:
        memory.allocate_fitting(allocate, 8, exactly=True)
    assert ADVICE in str(found.value)


def test_weights_that_do_not_fit(on_a_mac, monkeypatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("[metal::malloc] Unable to allocate 9 bytes.")

    monkeypatch.setattr(loader, "convert", full)
    with pytest.raises(ModelLoadError, match="its weights do not fit into memory") as found:
        loader.load()
    assert ADVICE in str(found.value) and "Unable to allocate" in str(found.value)
    monkeypatch.setattr(macos, "limit_advice_here", lambda: "")
    with pytest.raises(ModelLoadError, match=r"memory \(\[metal::malloc\] .*\.\)$"):
        loader.load()
