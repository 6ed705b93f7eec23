"""Setup of all tests: MLX's device, reproducible randomness, reproducible hypothesis.

The device is the CPU, or the GPU with MLX_PAGED_TEST_DEVICE=gpu. mlx-lm is paged, as `import
mlx_paged` makes it by default; oracles get unpatched mlx-lm from `support.plain`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import signal
import sys

if "PYTEST_XDIST_WORKER" in os.environ:
    # One core per worker. `native/test_threads.py` runs the kernels on several threads.
    os.environ.setdefault("MLX_PAGED_NUM_THREADS", "1")

# NumPy's products, in oracles, are small: its threads would spend more time waiting for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Tests start hundreds of interpreters, and compiling the package takes a fifth of each start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import mlx_paged  # before mlx.core, so that its BLAS takes effect

# isort: split
import support.child_site.transformers_table  # noqa: F401, before transformers is imported

# isort: split
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from support import programs
from support.reference import ON_GPU
from support.sampled_cases import sampled

from mlx_paged import drop_in
from mlx_paged.engine import gc_pause

# Caches the tests' bytecode, so that the workers of each run do not compile it again.
sys.dont_write_bytecode = False

# Shells make background processes ignore Ctrl-C, and the processes that tests start inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# glibc keeps freed memory. Models and pools come and go in most tests, and faulting their pages in
# again took a twentieth of the CPU time of all tests.
_libc = ctypes.CDLL(None)
if hasattr(_libc, "mallopt"):
    _libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at its maximum
    _libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
    _libc.mallopt(-2, 16 << 20)  # M_TOP_PAD


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks"),
            *("fordblks", "keepcost"),
        )
    ]


# Freed bytes that a worker keeps from one file of tests to the next.
_MAX_FREE_BYTES = 256 << 20


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Gives freed memory back after a file: the largest model of a worker's tests would stay."""
    if hasattr(_libc, "mallinfo2") and (nextitem is None or nextitem.path != item.path):
        _libc.mallinfo2.restype = _MallocInfo
        if _libc.mallinfo2().fordblks > _MAX_FREE_BYTES:
            _libc.malloc_trim(0)


# Deadlines fail slow machines, not slow code. `quick` is for runs that repeat a file many times.
_common = {
    "derandomize": True,
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("ci", max_examples=100, **_common)
settings.register_profile("quick", max_examples=25, **_common)
settings.load_profile("ci")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.stats.get("skipped", ())
    if line := programs.summary(str(report.longrepr[-1]) for report in reports):
        terminalreporter.write_line(line, yellow=True)


_freeze, _unfreeze = gc.freeze, gc.unfreeze


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Excludes tests and libraries, a million objects, from garbage collection.

    Collecting them takes most of a second, and models are full of cycles that trigger collections.
    Engines also freeze all objects, and unfreeze them when they end, including the tests'; so
    freezing does nothing here (except with `real_freezing`, and in tests that start processes).
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.freeze = gc.unfreeze = lambda: None
        gc.enable()


@pytest.fixture
def real_freezing() -> Iterator[None]:
    """The real `gc.freeze` and `gc.unfreeze`."""
    stand_in = gc.freeze
    gc.freeze, gc.unfreeze = _freeze, _unfreeze
    yield
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = stand_in


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests that only `make test-long` runs, unless MLX_PAGED_ALL_CASES is set.

    MLX_PAGED_TEST_SHARD=2/4 runs every fourth test, starting with the second.
    """
    if not os.environ.get("MLX_PAGED_ALL_CASES"):
        kept = set(left := sampled(items))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = left
    shard, shards = map(int, os.environ.get("MLX_PAGED_TEST_SHARD", "1/1").split("/"))
    others = [item for i, item in enumerate(items) if i % shards != shard - 1]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = items[shard - 1 :: shards]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seeds MLX's and NumPy's random states before a test's fixtures, its module's included.

    The clock seeds them otherwise, and what a test draws would depend on the tests before it.
    """
    np.random.seed(0)
    mx.random.seed(0)


@pytest.fixture(scope="session", autouse=True)
def children_without_torch() -> None:
    """Keeps torch, which only oracles in this process need, out of the interpreters that tests
    start.

    transformers imports torch if it is there, which is more than half of an interpreter's start.
    Set here and not at import, because the workers that run tests are children, too.
    """
    site = str(Path(__file__).parent / "support" / "child_site")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
    sys.path.append(site)  # which an engine's other ranks get as their PYTHONPATH


@pytest.fixture(scope="session", autouse=True)
def one_tls_context() -> None:
    """Shares what clients read the certificates of the system into: 20 ms for each client
    otherwise, and tests of the server make thousands."""
    for name in ("httpx", "httpx2"):
        try:
            transports: Any = importlib.import_module(f"{name}._transports.default")
        except ImportError:
            continue
        create = transports.create_ssl_context
        shared: list[Any] = []

        def of_all(
            verify: Any = True,
            *args: Any,
            create: Any = create,
            shared: Any = shared,
            **kwargs: Any,
        ) -> Any:
            if verify is not True or any(args) or kwargs.get("cert"):
                return create(verify, *args, **kwargs)
            if not shared:
                shared.append(create())
            return shared[0]

        transports.create_ssl_context = of_all


@pytest.fixture(scope="session", autouse=True)
def device() -> None:
    mx.set_default_device(mx.gpu if ON_GPU else mx.cpu)
    if ON_GPU:
        # Hundreds of engines start here, and few of them decode more than a few tokens.
        from mlx_paged.engine import warm_up

        warm_up.is_needed = lambda *_: False


@pytest.fixture(scope="session", autouse=True)
def no_memory_pressure() -> None:
    """Keeps engines from following the memory pressure of the machine that runs the tests."""
    from mlx_paged.engine import pressure_sources

    pressure_sources.system_source = lambda: None
    os.environ["MLX_PAGED_MEMORY_PRESSURE"] = "off"  # for servers in processes of their own


@pytest.fixture(autouse=True)
def no_log_handlers() -> Iterator[None]:
    """Removes log handlers that a test installed, because pytest closes their stream."""
    root = logging.getLogger()
    level = root.level
    yield
    # pytest's own handlers are subclasses.
    installed = [handler for handler in root.handlers if type(handler) is logging.StreamHandler]
    for handler in installed:
        root.removeHandler(handler)
    if installed:
        root.setLevel(level)


@pytest.fixture(autouse=True)
def shipped_default() -> Iterator[None]:
    """Restores a paged mlx-lm, if it is loaded, after a test that unpatched it; and collections."""
    drop_in.arrange()
    yield
    with gc_pause._lock:  # a shared engine may be in a step
        is_left_disabled = not gc.isenabled() and not gc_pause._threads
        if is_left_disabled:
            gc.enable()  # for the next test, because this one's objects may form cycles
    assert not is_left_disabled, "the garbage collector was left disabled"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="module")
def shared_llm() -> Any:
    """For tests that leave no state behind; `llm` checks that."""
    from support import embedded_llm  # loads a model

    return embedded_llm.make()


@pytest.fixture
def llm(shared_llm: Any) -> Iterator[Any]:
    """The embedded model's engine, with an empty cache."""
    from support import embedded_llm

    shared_llm.engine.reset_prefix_cache()
    yield shared_llm
    embedded_llm.check_at_rest(shared_llm)


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """mlx-lm with the drop-in, before it has seen a model."""
    monkeypatch.delenv("MLX_PAGED_DISABLE", raising=False)
    mlx_paged.unpatch()
    assert mlx_paged.patch()
    yield
    mlx_paged.unpatch()
