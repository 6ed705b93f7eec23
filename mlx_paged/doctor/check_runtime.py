"""Findings about what ran: imports, BLAS, self-test, bandwidth."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_paged.doctor.finding import Finding, Status
from mlx_paged.doctor.isolation import Outcome
from mlx_paged.doctor.jobs import EXTENSION, MATMUL, MLX
from mlx_paged.doctor.machine import Machine

_REPORT = "report it with the output of `mlx-paged doctor --json`"
_REINSTALL = (
    "pip install --force-reinstall 'mlx-paged[cpu]' (another extra for a GPU; none on a Mac)"
)
_REBUILD = "pip install --force-reinstall --no-deps . (in mlx_paged's checkout)"
# The reference BLAS of MLX makes one or two GFLOP/s, a sixtieth of OpenBLAS, which NumPy brings.
# Whatever makes ten is not it, however busy the machine is.
_LEAST_OF_NUMPY, _SURELY_FAST = 0.2, 10.0
# A copy on an H200 reaches 89 percent of what is published. Half of it means that something else
# uses the memory, or that the chip is throttled.
_LEAST_OF_PUBLISHED = 0.5


def check(outcomes: Mapping[str, Outcome], machine: Machine) -> list[Finding]:
    """Everything that a job told."""
    return [
        *_imports(outcomes),
        *_same_sources(outcomes),
        *_gpu(outcomes),
        *_blas(outcomes),
        *_self_test(outcomes),
        *_bandwidth(outcomes, machine),
    ]


def _imports(outcomes: Mapping[str, Outcome]) -> list[Finding]:
    findings = []
    for job, name, remedy in (
        (MLX, "MLX imports", _REINSTALL),
        (
            EXTENSION,
            "extension loads",
            _REBUILD,
        ),
    ):
        outcome = outcomes[job]
        expected = "no error"
        if outcome.error is None:
            findings.append(Finding(name, Status.OK, expected, "no error"))
        elif job == EXTENSION and outcomes[MLX].error is not None:
            findings.append(Finding(name, Status.SKIPPED, expected, "MLX does not import"))
        else:
            findings.append(Finding(name, Status.BROKEN, expected, outcome.error, remedy))
    return findings


def _same_sources(outcomes: Mapping[str, Outcome]) -> list[Finding]:
    """In a checkout the Python moves on at once, and the extension when it is built."""
    extension = outcomes[EXTENSION]
    if extension.error:
        return []
    name, missing = "extension is up to date", extension.value["missing"]
    expected = "every function that the package calls"
    if not missing:
        return [Finding(name, Status.OK, expected, "all are there")]
    found = f"it lacks {', '.join(missing)}"
    return [Finding(name, Status.BROKEN, expected, found, _REBUILD)]


def _gpu(outcomes: Mapping[str, Outcome]) -> list[Finding]:
    """Whether MLX computes where this build has kernels."""
    mlx, extension = outcomes[MLX], outcomes[EXTENSION]
    if mlx.error or extension.error:
        return []
    backends = extension.value["build_info"]["backends"].split()
    built = [b for b in backends if b in ("metal", "cuda")]
    expected = "MLX's default device is one that this build has kernels for"
    device = mlx.value["default_device"]
    found = f"default device {device}; built for {', '.join(backends)}"
    if device == "gpu" and not built:
        remedy = "build with a GPU backend (docs/cuda.md); until then the engine runs on the CPU"
        return [Finding("backend", Status.WARNING, expected, found, remedy)]
    if device == "cpu" and built:
        remedy = "MLX sees no GPU: install MLX's build for it, and look at the driver"
        return [Finding("backend", Status.WARNING, expected, found, remedy)]
    return [Finding("backend", Status.OK, expected, found)]


def _blas(outcomes: Mapping[str, Outcome]) -> list[Finding]:
    extension = outcomes[EXTENSION]
    if extension.error:
        return []
    status: str = extension.value["build_info"]["blas"]
    expected = "OpenBLAS, Accelerate, or MLX on a GPU"
    is_fast = status.startswith(("OpenBLAS", "Accelerate", "preloaded")) or "on a GPU" in status
    if not is_fast:
        if "before mlx_paged" in status:
            remedy = "import mlx_paged before mlx.core: the linker binds BLAS once"
        elif "MLX_PAGED_BLAS=off" in status:
            remedy = "unset MLX_PAGED_BLAS, unless you meant it"
        else:
            remedy = "pip install 'mlx-paged[cpu]'"
        return [Finding("BLAS", Status.WARNING, expected, status, remedy)]
    findings = [Finding("BLAS", Status.OK, expected, status)]
    matmul = outcomes.get(MATMUL)
    if matmul is not None and matmul.error is None and "on a GPU" not in status:
        mine, numpys = matmul.value["mlx_gflops"], matmul.value["numpy_gflops"]
        least = min(_LEAST_OF_NUMPY * numpys, _SURELY_FAST)
        expected = f"at least {least:.0f} GFLOP/s (NumPy makes {numpys:.0f})"
        found = f"{mine:.0f} GFLOP/s in float32 on the CPU"
        if mine >= least:
            findings.append(Finding("matrix product", Status.OK, expected, found))
        else:
            remedy = "something imports mlx.core before mlx_paged (sitecustomize, a .pth file?)"
            findings.append(Finding("matrix product", Status.WARNING, expected, found, remedy))
    return findings


def _self_test(outcomes: Mapping[str, Outcome]) -> list[Finding]:
    """One finding for each device; or for each case that failed, alike failures as one."""
    findings = []
    for device in ("cpu", "gpu"):
        cases = {name: o for name, o in outcomes.items() if name.startswith(f"test/{device}/")}
        name = f"self-test on the {device.upper()}"
        listing = outcomes.get(f"cases/{device}")
        if listing is not None and listing.error is not None:
            expected = "the cases load"
            findings.append(Finding(name, Status.BROKEN, expected, listing.error, _REPORT))
            continue
        if not cases:
            continue
        failed: dict[str, list[str]] = {}  # cases by error
        for case, outcome in cases.items():
            if outcome.error is not None:
                failed.setdefault(outcome.error, []).append(case)
        for error, alike in failed.items():
            _, _, primitive, dtype = alike[0].split("/")
            which = f"{primitive} in {dtype}"
            which += f" and {len(alike) - 1} more" if len(alike) > 1 else ""
            expected = "NumPy's result in float64"
            findings.append(Finding(f"{name}: {which}", Status.BROKEN, expected, error, _REPORT))
        if not failed:
            seconds = sum(float(o.value) for o in cases.values())
            found = f"{len(cases)} of {len(cases)} in {seconds:.1f} s"
            findings.append(Finding(name, Status.OK, "every primitive agrees with NumPy", found))
    return findings


def _bandwidth(outcomes: Mapping[str, Outcome], machine: Machine) -> list[Finding]:
    findings = []
    for device in ("cpu", "gpu"):
        outcome = outcomes.get(f"bandwidth/{device}")
        if outcome is None:
            continue
        name = f"memory bandwidth of the {device.upper()}"
        published = machine.published.bandwidth if machine.published else None
        if outcome.error is not None:
            remedy = "free some memory and run it again"
            findings.append(Finding(name, Status.WARNING, "a copy runs", outcome.error, remedy))
            continue
        measured = float(outcome.value) / 1e9
        found = f"{measured:.0f} GB/s, read and written"
        if device == "cpu" or published is None:
            expected = "measured; no published figure to compare with"
            findings.append(Finding(name, Status.OK, expected, found))
            continue
        expected = f"at least half of the published {published:g} GB/s"
        if measured >= _LEAST_OF_PUBLISHED * published:
            findings.append(Finding(name, Status.OK, expected, found))
        else:
            remedy = "close what else uses the GPU, plug in the power supply, and run it again"
            findings.append(Finding(name, Status.WARNING, expected, found, remedy))
    return findings
