"""Alternatives that calibration times besides tiles of attention: pieces of split contexts, and
products outside of whole steps by our kernels or by MLX's. The simulated GPU counts seconds by
kernel."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from support.planted_kernels import VARIABLE, Clock, simulated_with_faults
from support.simulated import launches, needs_simulator, simulated, simulated_extension

from mlx_paged import kernels, ops, plain_ops
from mlx_paged.calibration import cases, check, child, table, timing
from mlx_paged.calibration.cache import Result
from mlx_paged.calibration.cases import Needs, Product, layer_text
from mlx_paged.calibration.verdicts import Verdicts
from mlx_paged.kernels import AllowedProduct, AttentionLayer
from mlx_paged.model import patches
from mlx_paged.model.plan import build_plan

LAYER = AttentionLayer("float32", 1, 32, 32, 0, 0, 0)
OTHER = AttentionLayer("float32", 1, 64, 64, 0, 0, 0)
PRODUCTS = (Product(40, 64, 4, 32, "affine"), Product(64, 40, 0), Product(24, 64, 4, 32, "affine"))
NEEDS = Needs("float32", (LAYER,), 16, 64, PRODUCTS, step_rows=16)
SPLIT = f"time-split/{layer_text(LAYER)}/16"
# Products have kernels in 16 bits.
HALVES = Needs("float16", (), 16, 64, PRODUCTS)
OURS, DENSE = "product_rows_float16_affine_4_m", "product_rows_float16_m"
ONE, FEW, MANY = (job for job, *_ in list(cases.product_jobs(HALVES))[:3])


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    for extension in (nullcontext, simulated_extension):
        with extension():
            Verdicts().apply()
            kernels.reject_kernels(())


# --- Jobs and verdicts ----------------------------------------------------------------------------


def timings_of(needs: Needs) -> list[str]:
    return cases.timings(needs, kernels.attention_kernel, kernels.reject_kernels)


def test_pieces_and_quantized_products_are_timed() -> None:
    jobs = timings_of(NEEDS)
    assert [job for job in jobs if job.startswith("time-split/")] == [
        f"{SPLIT}/{tokens}" for tokens in cases.PIECE_TOKENS
    ]
    assert not any("products" in job for job in jobs), "float32"


def test_products_are_timed_by_format_and_rows() -> None:
    jobs = [job for job in timings_of(HALVES) if job.startswith("time-products/")]
    dense = json.dumps([str(PRODUCTS[1])], separators=(",", ":"))
    assert jobs == [
        f"{job}/{way}"
        for base, kernel in (
            (ONE.rpartition("/")[0], OURS),
            (f"time-products/float16/{dense}", DENSE),
        )
        for job, tile in ((f"{base}/1", 1), (f"{base}/4", 4), (f"{base}/16", 16))
        for way in (f"{kernel}{tile}", "mlx")
    ]
    assert json.loads(ONE.split("/")[2]) == [str(PRODUCTS[0]), str(PRODUCTS[2])]


def test_the_rows_that_were_measured_stand_for_all() -> None:
    ranges = [cases.product_rows(rows) for rows in cases.PRODUCT_ROWS]
    assert ranges[0] == (1, 1) and ranges[-1] == (129, kernels.MAX_ROWS)
    assert all(end + 1 == begin for (_, end), (begin, _) in pairwise(ranges))


def seconds_of(*seconds: float, layer: AttentionLayer = LAYER) -> dict[str, Result]:
    shape = f"time-split/{layer_text(layer)}/16"
    return {f"{shape}/{n}": Result((), None, s) for n, s in zip(cases.PIECE_TOKENS, seconds)}


def test_the_best_pieces_of_all_layers_together_are_chosen() -> None:
    both = Needs("float32", (LAYER, OTHER), 16)
    one, other = seconds_of(3.0, 2.0, 1.0, 9.0), seconds_of(3.0, 1.0, 3.0, 9.0, layer=OTHER)
    assert Verdicts.of({**one, **other}, both).piece_tokens == 192
    assert Verdicts.of(one, NEEDS).piece_tokens == 768
    assert Verdicts.of({**one, **other}, Needs("float32", (), 16)).piece_tokens == 0


def test_the_built_in_pieces_stay_unless_others_are_clearly_better() -> None:
    assert Verdicts.of(seconds_of(1.09, 1.0, 2.0, 2.0), NEEDS).piece_tokens == 0
    assert Verdicts.of(seconds_of(1.11, 1.0, 2.0, 2.0), NEEDS).piece_tokens == 192
    assert Verdicts.of(seconds_of(3.0), NEEDS).piece_tokens == 0, "nothing to compare with"
    assert Verdicts.of({}, NEEDS).piece_tokens == 0


def timed(job: str, **seconds: float) -> dict[str, Result]:
    """Outcomes of a job's ways; `mlx` has no kernel."""
    return {
        f"{job}/{way}": Result(() if way == cases.MLX else (way,), None, s)
        for way, s in seconds.items()
    }


def test_products_are_ours_where_they_are_proven_and_not_slower() -> None:
    results = {"check": Result((f"{OURS}1", f"{OURS}4", f"{OURS}16"))}
    results |= timed(ONE, **{f"{OURS}1": 1.0, "mlx": 1.0})
    results |= timed(FEW, **{f"{OURS}4": 1.0, "mlx": 0.9})
    results |= timed(MANY, **{f"{OURS}16": 1.0, "mlx": 2.0})
    one, many = AllowedProduct(f"{OURS}1", 1, 1), AllowedProduct(f"{OURS}16", 5, 16)
    assert Verdicts.of(results, HALVES).products == {one, many}
    results["wrong"] = Result((f"{OURS}1",), "WrongResult")
    assert Verdicts.of(results, HALVES).products == {many}
    results[f"{MANY}/{OURS}16"] = Result((f"{OURS}16",), "Crash")
    verdicts = Verdicts.of(results, HALVES)
    assert verdicts.products == set() and f"{OURS}16" not in verdicts.rejected
    assert not Verdicts.of(timed(ONE, **{f"{OURS}1": 1.0, "mlx": 2.0}), HALVES).products


def test_the_fastest_of_several_tiles_is_ours() -> None:
    """Also if another model, whose kernels were rejected meanwhile, was loaded before."""
    tiles = [f"tensor_product_float16_affine_4_m{rows}" for rows in (32, 64, 128)]
    kernels.reject_kernels(tiles)
    jobs = {rows: job for job, product, rows in cases.product_jobs(HALVES) if product.bits}
    results = {"check": Result((tiles[0], tiles[2]))}
    results |= timed(jobs[32], **dict(zip(tiles, (2.0, 1.0, 2.5))), mlx=3.0)
    results |= timed(jobs[128], **dict(zip(tiles, (2.0, 1.0, 1.5))), mlx=1.0)
    results |= timed(jobs[512], **dict(zip(tiles, (2.0, 1.0, 1.5))), mlx=3.0)
    assert Verdicts.of(results, HALVES).products == {
        AllowedProduct(tiles[0], 17, 32),
        AllowedProduct(tiles[2], 129, kernels.MAX_ROWS),
    }


@needs_simulator
def test_decodes_have_the_pieces_that_were_chosen() -> None:
    def num_pieces() -> int:
        plan = build_plan([list(range(1, 513))], [8192], [1], block_size=16)
        return int((plan.work_items[:, 5] >= 0).sum())

    with simulated():
        before = num_pieces()
        for tokens in (768, 192, 0):
            Verdicts(piece_tokens=tokens).apply()
            assert num_pieces() == {768: 11, 192: 43, 0: before}[tokens]


# --- On the simulated GPU, with faults ------------------------------------------------------------


@pytest.fixture
def outcome(monkeypatch) -> Callable[..., Result]:
    """Runs a job with planted faults, as a process that has no model. MLX's products take ten
    seconds each."""
    patches.uninstall()
    announced: list[list[str]] = [[]]
    for module in (check, timing):
        monkeypatch.setattr(module, "announce", announced.append)
    monkeypatch.setattr(child.child_jobs, "announced", lambda: announced[-1])
    monkeypatch.setattr(timing, "LONG_CONTEXTS", (1, 400))
    monkeypatch.setattr(timing, "CALLS", 1)
    monkeypatch.setattr(timing, "REPEATS", 1)
    monkeypatch.setattr(timing, "clock", clock := Clock())
    right = mx.quantized_matmul

    def by_mlx(*args, **options) -> mx.array:
        clock.seconds += 10
        return right(*args, **options)

    monkeypatch.setattr(mx, "quantized_matmul", by_mlx)

    def run(job: str, **faults: str) -> Result:
        monkeypatch.setenv(VARIABLE, json.dumps(faults))
        monkeypatch.setattr(check, "programs", check.Programs())
        announced.append([])
        with simulated_with_faults(clock):
            try:
                value = child.run(job)
                assert "unsupported" not in value, value
            except check.WrongResult as error:
                return Result(tuple(announced[-1]), str(error))
        return Result(tuple(announced[-1]), None, value.get("seconds"))

    return run


@needs_simulator
def test_slow_merges_make_pieces_longer(outcome) -> None:
    def chosen(**faults: str) -> int:
        jobs = [job for job in timings_of(NEEDS) if job.startswith("time-split/")]
        return Verdicts.of({job: outcome(job, **faults) for job in jobs}, NEEDS).piece_tokens

    assert chosen(paged_decode_float32_32_32_q1="slow") == 0
    assert chosen(paged_merge_float32_32="slow") == 768


@needs_simulator
def test_slow_and_wrong_products_are_left_to_mlx(outcome) -> None:
    shape, few = PRODUCTS[0].small, AllowedProduct(f"{OURS}1", 1, 1)
    right = {"check": outcome(f"product/float16/{shape}")}
    assert set(right["check"].kernels) == {f"{OURS}{rows}" for rows in (1, 4, 16)}
    jobs = [
        f"{job}/{way}" for job, tile in ((ONE, 1), (MANY, 16)) for way in (f"{OURS}{tile}", "mlx")
    ]
    times = {job: outcome(job, **{f"{OURS}16": "slow"}) for job in jobs}
    assert Verdicts.of({**right, **times}, HALVES).products == {few}
    wrong = {"check": outcome(f"product/float16/{shape}", **{f"{OURS}1": "wrong"})}
    verdicts = Verdicts.of({**wrong, **times}, HALVES)
    assert not verdicts.products and "of its norm" in verdicts.rejected[f"{OURS}1"]


# --- Adapters -------------------------------------------------------------------------------------


@needs_simulator
@pytest.mark.parametrize("kernel", ["lora_down_float32", "lora_up_float32"])
def test_wrong_kernels_of_adapters_are_found_and_replaced(rng, outcome, kernel) -> None:
    assert "lora/float32" in cases.checks(NEEDS, kernels.attention_kernel)
    assert outcome("lora/float32") == Result(("lora_down_float32", "lora_up_float32"))
    verdicts = Verdicts.of({"lora/float32": outcome("lora/float32", **{kernel: "wrong"})}, NEEDS)
    assert kernel in verdicts.rejected
    base, x, a, b = (
        mx.array(rng.standard_normal(shape).astype(np.float32))
        for shape in ((3, 24), (3, 64), (2, 4, 64), (2, 4, 24))
    )
    mx.eval(base, x, a, b)
    with simulated():
        verdicts.apply()
        out = ops.lora(base, x, mx.array([1, -1, 2], mx.int32), a, b)
        mx.eval(out)
        assert not launches()
    added = (np.array(a[1]) @ np.array(x[0])) @ np.array(b[1])
    np.testing.assert_allclose(np.array(out[0]), np.array(base[0]) + added, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.array(out[1:]), np.array(base[1:]))


@needs_simulator
@pytest.mark.parametrize("shape", [(), (2,)], ids=str)
def test_adapters_in_mlxs_operations_give_the_kernels_result(rng, shape) -> None:
    base, x = (mx.array(rng.standard_normal((3, *shape, n)).astype(np.float16)) for n in (24, 64))
    if shape:  # one vector per row
        base, x = base[:, :1], x[:, :1]
    a, b = (mx.array(rng.standard_normal(s).astype(np.float16)) for s in ((2, 4, 64), (2, 4, 24)))
    adapters = mx.array([0, -1, 1], mx.int32)
    mx.eval(base, x, a, b)
    with simulated():
        ours = ops.lora(base, x, adapters, a, b)
        mx.eval(ours)
    theirs = plain_ops.lora(base, x, adapters, a, b)
    assert theirs.dtype == ours.dtype and theirs.shape == ours.shape
    np.testing.assert_allclose(np.array(ours), np.array(theirs), rtol=2e-3, atol=2e-2)


def test_the_table_says_what_was_chosen() -> None:
    results = {"check": Result((f"{OURS}1",)), **seconds_of(3.0, 2.0, 1.0, 9.0)}
    results |= timed(ONE, **{f"{OURS}1": 0.001, "mlx": 0.002})
    made = table.table_of(Verdicts.of(results, replace(HALVES, layers=(LAYER,))), {})
    assert list(table.lines(made)) == [
        f"{OURS}1: right",
        "pieces of contexts, float32, group 1, dims 32/32: 768 1000.000 ms, 192 2000.000 ms, "
        "0 3000.000 ms, 1536 9000.000 ms",
        f"2 products in float16, affine of 4 bits in groups of 32, 1 rows: {OURS}1 1.000 ms, "
        "mlx 2.000 ms",
        "whole steps: not used",
        f"products outside of them: {OURS}1 (rows: 1)",
        "pieces of contexts: 768 tokens or more",
    ]
