"""The checks: pure functions from facts to findings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mlx_paged import macos
from mlx_paged.child_jobs import Outcome
from mlx_paged.doctor import jobs
from mlx_paged.doctor.fits import Fit
from mlx_paged.doctor.machine import Disk, Machine
from mlx_paged.doctor.software import Software

# Requirements of MLX's installation page (ml-explore.github.io/mlx, "Build and Install").
_MIN_MACOS = "14.0"
_MIN_DRIVER = {"mlx-cuda-12": "550.54.14", "mlx-cuda-13": "580"}
_MIN_CAPABILITY = "7.5"
_MIN_DISK = 5 << 30  # the weights of an 8B model in 4 bits
_GIB = 1 << 30

_REPORT = "report it with the output of `mlx-paged doctor --json`"


class Status(StrEnum):
    """The outcome of a check."""

    OK = "ok"
    SKIPPED = "skipped"  # another problem prevented the check
    WARNING = "warning"  # works, but more slowly or with fewer features than possible
    BROKEN = "broken"  # does not work


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: Name of the check; stable, for scripts.
        remedy: One line; empty if there is nothing to do.

    Raises:
        ValueError: A warning without a remedy, or with several lines.
    """

    check: str
    status: Status
    expected: str
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.status in (Status.WARNING, Status.BROKEN) and not self.remedy:
            raise ValueError(f"finding {self.check!r} must have a remedy, as it is {self.status}")
        if "\n" in self.remedy:
            raise ValueError(f"the remedy of {self.check!r} must be one line but got {self.remedy}")


def verdict(findings: Iterable[Finding]) -> Status:
    """The worst status of the findings: broken, warning or ok."""
    statuses = {finding.status for finding in findings}
    return next((s for s in (Status.BROKEN, Status.WARNING) if s in statuses), Status.OK)


def check(
    machine: Machine, software: Software, outcomes: Mapping[str, Outcome], fits: Sequence[Fit]
) -> Iterator[Finding]:
    """Returns all findings, problems or not.

    Args:
        outcomes: Outcomes of the jobs that ran.
        fits: Empty if the memory is unknown.
    """
    yield from _packages(software)
    yield from _backend_package(software, machine)
    yield from _loading(outcomes, software)
    if outcomes[jobs.EXTENSION].error is None:
        build: dict[str, str] = outcomes[jobs.EXTENSION].value["build_info"]
        yield from _backend(machine, build, outcomes[jobs.MLX].value["default_device"])
        yield _blas(build["blas"])
        yield from _self_test(outcomes)
        yield _steps(outcomes.get(jobs.STEPS))
        yield from _calibration(outcomes.get(jobs.CALIBRATE) or outcomes.get(jobs.CALIBRATION))
        yield _threads(machine, int(build["num_threads"]))
        yield from _amx(build["amx"])
    yield from _mac(machine)
    yield from _nvidia(machine, software)
    yield _memory(outcomes.get(jobs.MEMORY), fits, machine)
    if machine.disk is not None:
        yield _disk(machine.disk)


def version(text: str | None) -> tuple[int, ...]:
    """Numbers of a dotted version, up to the first part that is not a number."""
    numbers = []
    for part in (text or "").split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _judged(
    is_well: bool,
    name: str,
    expected: str,
    found: str,
    remedy: str,
    otherwise: Status = Status.WARNING,
) -> Finding:
    if is_well:
        return Finding(name, Status.OK, expected, found)
    return Finding(name, otherwise, expected, found, remedy)


# --- Installation ---------------------------------------------------------------------------------


def _packages(software: Software) -> Iterator[Finding]:
    for r in software.requirements:
        # A different MLX crashes, because it has no stable ABI; a different mlx-lm may work.
        is_fatal = r.installed is None or r.name == "mlx"
        expected = f"{r.name} {r.specifier}".strip()
        found = f"{r.name} {r.installed}" if r.installed else "not installed"
        remedy = f"pip install '{r.name}{r.specifier}'"
        if r.name == "mlx-paged":
            remedy = "pip install . (in mlx_paged's checkout), with the Python that you run"
        status = Status.BROKEN if is_fatal else Status.WARNING
        yield _judged(r.is_met, f"package {r.name}", expected, found, remedy, status)


def _backend_package(software: Software, machine: Machine) -> Iterator[Finding]:
    """Checks MLX's compiled half, a separate package that an extra selects."""
    mlx = software.packages.get("mlx")
    if mlx is None:
        return
    choices = ("mlx-metal",) if machine.is_mac else ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")
    installed = {name: v for name in choices if (v := software.packages.get(name))}
    found = " and ".join(f"{name} {v}" for name, v in installed.items()) or "none"
    expected = f"one of {', '.join(choices)}, of MLX's version {mlx}"
    status, remedy = Status.BROKEN, f"pip install --force-reinstall 'mlx=={mlx}'"
    if len(installed) > 1:
        status, found = Status.WARNING, f"{found}, which overwrite each other's libmlx"
        remedy = f"pip uninstall {' '.join(installed)}, then install the one that you want"
    elif installed:
        found += f" beside mlx {mlx}"
        remedy = f"pip install '{next(iter(installed))}=={mlx}'"
    elif not machine.is_mac:
        remedy = "pip install 'mlx-paged[cpu]', or [cuda12] or [cuda13] with an NVIDIA GPU"
    is_well = list(installed.values()) == [mlx]
    yield _judged(is_well, "MLX's backend", expected, found, remedy, status)


# --- Results of jobs ------------------------------------------------------------------------------


def _loading(outcomes: Mapping[str, Outcome], software: Software) -> Iterator[Finding]:
    mlx, extension = outcomes[jobs.MLX].error, outcomes[jobs.EXTENSION].error
    none = "no error"
    rebuild = (
        "pip install --force-reinstall --no-deps . in mlx_paged's checkout; without a checkout "
        f"'mlx-paged=={software.packages.get('mlx-paged')}' instead of the dot"
    )
    wanted = next((r.specifier for r in software.requirements if r.name == "mlx"), "")
    remedy = (
        f"pip install --force-reinstall 'mlx[cpu]{wanted}' (another extra for a GPU; none on a Mac)"
    )
    yield _judged(mlx is None, "MLX imports", none, mlx or none, remedy, Status.BROKEN)
    if mlx is not None:
        yield Finding("extension loads", Status.SKIPPED, none, "MLX does not import")
        return
    name = "extension loads"
    yield _judged(extension is None, name, none, extension or none, rebuild, Status.BROKEN)
    if extension is None:
        # In a checkout, Python changes take effect immediately; the extension must be rebuilt.
        missing = outcomes[jobs.EXTENSION].value["missing"]
        found = f"it lacks {', '.join(missing)}" if missing else "all are there"
        name, expected = "extension is up to date", "every function that the package calls"
        yield _judged(not missing, name, expected, found, rebuild, Status.BROKEN)


def _backend(machine: Machine, build: Mapping[str, str], device: str) -> Iterator[Finding]:
    """Returns True if MLX computes where this build has kernels, and on the GPU if there is one."""
    built = build["backends"].split()
    has_kernels = bool({"metal", "cuda"} & set(built))
    gpus = ", ".join(dict.fromkeys(gpu.name for gpu in machine.gpus)) or "no GPU"
    found = f"default device {device}; built for {', '.join(built)}; {gpus}"
    remedy = "MLX sees no GPU: install MLX's build for it, and look at the driver"
    is_well = has_kernels == (device == "gpu")
    if not has_kernels:
        is_well = device == "cpu" and not machine.gpus
        remedy = (
            "pip install --force-reinstall --no-deps . (on this Mac)"
            if machine.is_mac
            else "MLX_PAGED_CUDA=ON pip install --force-reinstall --no-deps . in a checkout "
            "(docs/cuda.md); until then the engine runs on the CPU"
        )
    expected = "MLX's default device is the GPU if there is one, and this build has kernels for it"
    yield _judged(is_well, "GPU backend", expected, found, remedy)


def _blas(status: str) -> Finding:
    is_fast = status.startswith(("OpenBLAS", "Accelerate", "preloaded")) or "on a GPU" in status
    remedy = "pip install 'mlx-paged[cpu]'"
    if "before mlx_paged" in status:
        remedy = "put `import mlx_paged` above the first import of mlx or mlx_lm"
    elif "MLX_PAGED_BLAS=off" in status:
        remedy = "unset MLX_PAGED_BLAS, unless you meant it"
    return _judged(is_fast, "BLAS", "OpenBLAS, Accelerate, or MLX on a GPU", status, remedy)


def _self_test(outcomes: Mapping[str, Outcome]) -> Iterator[Finding]:
    """Returns one finding per device, or one per distinct error if cases failed."""
    for device in ("cpu", "gpu"):
        name, listing = f"self-test on the {device.upper()}", outcomes.get(f"cases/{device}")
        if listing is not None and listing.error is not None:
            yield Finding(name, Status.BROKEN, "the cases load", listing.error, _REPORT)
        cases = {job: o for job, o in outcomes.items() if job.startswith(f"test/{device}/")}
        failed: dict[str, list[str]] = {}  # names of jobs by error
        for job, outcome in cases.items():
            if outcome.error is not None:
                failed.setdefault(outcome.error, []).append(job)
        for error, names in failed.items():
            _, _, primitive, dtype = names[0].split("/")
            which = f"{name}: {primitive} in {dtype}"
            which += f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield Finding(which, Status.BROKEN, "NumPy's result in float64", error, _REPORT)
        if cases and not failed:
            seconds = sum(float(o.value) for o in cases.values())
            found = f"{len(cases)} of {len(cases)} in {seconds:.1f} s"
            yield Finding(name, Status.OK, "every primitive agrees with NumPy", found)


def _steps(outcome: Outcome | None) -> Finding:
    name, expected = "whole steps", "decode steps of the embedded model compile as a whole"
    if outcome is None:
        return Finding(name, Status.SKIPPED, expected, "not tried")
    if outcome.error is not None:
        return Finding(name, Status.BROKEN, expected, outcome.error, _REPORT)
    steps = outcome.value
    if not steps["supported"]:
        return Finding(name, Status.SKIPPED, expected, "this device has no whole steps")
    foreign = ", ".join(f"{name} ({count})" for name, count in steps["foreign"].items())
    found = steps["refused"] or (f"MLX runs {foreign} itself" if foreign else "they do")
    return _judged(found == "they do", name, expected, found, _REPORT)


def _calibration(outcome: Outcome | None) -> Iterator[Finding]:
    """Warns of kernels that calibration rejected; slower ones are as good as right."""
    if outcome is None or outcome == Outcome():  # it has never run on this machine
        return
    name, expected = "calibration", "the GPU's kernels give MLX's results"
    if outcome.error is not None:
        yield Finding(name, Status.BROKEN, expected, outcome.error, _REPORT)
    else:
        kernels = outcome.value["kernels"]
        faults = [
            k for k in kernels if k["verdict"] != "right" and " ms where " not in k["verdict"]
        ]
        rows = outcome.value["step_rows"]
        found = f"{len(kernels) - len(faults)} of {len(kernels)} do; "
        found += (
            f"whole steps of up to {rows} rows are used" if rows else "whole steps are not used"
        )
        for fault in faults:
            found += f"; {fault['kernel']}: {fault['verdict']}"
        remedy = f"other kernels or MLX replace them; {_REPORT}"
        yield _judged(not faults, name, expected, found, remedy)


# --- The machine ----------------------------------------------------------------------------------


def _threads(machine: Machine, threads: int) -> Finding:
    """Warns if there are more threads than CPUs' worth of quota; all stall when it is used up."""
    found, max_threads, cpus = f"{threads} threads", threads, machine.usable_cpus
    if cpus is not None:
        found, max_threads = f"{found} on {cpus:g} CPUs", max(1, math.ceil(cpus))
        if cpus == machine.limits.cpus and threads > max_threads:
            found += " (CPU quota of the control group)"
    expected = "no more threads than this process gets CPUs"
    return _judged(
        threads <= max_threads,
        "threads",
        expected,
        found,
        f"set MLX_PAGED_NUM_THREADS={max_threads}",
    )


def _amx(status: str) -> Iterator[Finding]:
    """Warns if the processor has AMX tiles that this process may not use."""
    if status != "no":
        expected = "the processor's AMX tiles can be used"
        remedy = "allow arch_prctl in the container's seccomp profile, on Linux 5.16 or later"
        yield _judged(status == "yes", "AMX", expected, status, remedy)


def _mac(machine: Machine) -> Iterator[Finding]:
    if not machine.is_mac:
        return
    name, expected = "macOS", f"macOS {_MIN_MACOS} or later"
    found = version(machine.system.removeprefix("macOS").strip())
    if found:
        is_well, remedy = found >= version(_MIN_MACOS), f"update to {expected}; MLX needs it"
        yield _judged(is_well, name, expected, machine.system, remedy, Status.BROKEN)
    else:
        yield Finding(name, Status.SKIPPED, expected, "version unknown")
    runs, remedy = machine.architecture, "use a Mac with an Apple chip: MLX has no build for Intel"
    if machine.is_translated:
        runs = "x86_64 under Rosetta 2"
        remedy = "install a Python for arm64 (python.org or Homebrew) and a new environment with it"
    expected = "a Python for arm64, on an Apple chip"
    yield _judged(runs == "arm64", "native Python", expected, runs, remedy, Status.BROKEN)
    if machine.memory_bytes is not None and machine.wired_limit_mb is not None:
        yield _gpu_limit(machine.memory_bytes, machine.wired_limit_mb)


def _gpu_limit(memory_bytes: int, limit_mb: int) -> Finding:
    """Judges the limit that the user may have set, which must leave the system enough."""
    now, limit = macos.gpu_bytes(memory_bytes, limit_mb), macos.max_gpu_bytes(memory_bytes)
    name, expected = (
        "GPU memory limit",
        f"at most {limit / _GIB:.1f} GiB, which the system can spare",
    )
    default = "the default" if limit_mb == 0 else f"{macos.WIRED_LIMIT}={limit_mb}"
    found = f"{now / _GIB:.1f} of {memory_bytes / _GIB:.1f} GiB ({default})"
    remedy = f"sudo sysctl {macos.WIRED_LIMIT}={limit >> 20}, or =0 for the system's default"
    return _judged(limit_mb == 0 or now <= limit, name, expected, found, remedy)


def _nvidia(machine: Machine, software: Software) -> Iterator[Finding]:
    if machine.is_mac:
        return
    backend = next((name for name in _MIN_DRIVER if name in software.packages), None)
    if backend and not machine.gpus:
        remedy = "nvidia-smi must work: install the driver, or run the container with --gpus all"
        yield Finding("NVIDIA driver", Status.WARNING, f"a GPU for {backend}", "no GPU", remedy)
    for gpu in machine.gpus:
        if backend:
            minimum = _MIN_DRIVER[backend]
            expected, found = f"{minimum} or later, for {backend}", f"{gpu.driver} ({gpu.name})"
            remedy = f"update the driver to {expected}"
            remedy += ", or use the extra [cuda12]" if backend == "mlx-cuda-13" else ""
            is_well = version(gpu.driver) >= version(minimum)
            yield _judged(is_well, "NVIDIA driver", expected, found, remedy, Status.BROKEN)
        if version(gpu.compute_capability):
            is_well = version(gpu.compute_capability) >= version(_MIN_CAPABILITY)
            expected = f"compute capability {_MIN_CAPABILITY} or more"
            found = f"{gpu.compute_capability} ({gpu.name})"
            remedy = "use the CPU backend: pip install 'mlx-paged[cpu]'"
            yield _judged(is_well, "NVIDIA GPU", expected, found, remedy)


def _memory(outcome: Outcome | None, fits: Sequence[Fit], machine: Machine) -> Finding:
    name, expected = "memory for models", "room for the embedded model and its keys and values"
    if outcome is None:
        reason = "MLX or the extension does not load"
        return Finding(name, Status.SKIPPED, expected, reason)
    if outcome.error is not None:
        return Finding(name, Status.BROKEN, expected, outcome.error, _REPORT)
    models, fitting = ({fit.model for fit in fits if fit.num_blocks >= n} for n in (0, 1))
    found = fits[0].reason or (
        f"{fits[0].num_tokens:,} tokens beside the embedded model; "
        f"{len(fitting)} of {len(models)} models of the table fit in some precision"
    )
    remedy = "give the process more memory, or close what else uses it"
    if machine.memory_bytes is not None and machine.wired_limit_mb is not None:
        remedy += f"; {macos.limit_advice(machine.memory_bytes, machine.wired_limit_mb)}"
    return _judged(not fits[0].reason, name, expected, found, remedy, Status.BROKEN)


def _disk(disk: Disk) -> Finding:
    expected = f"{_MIN_DISK // _GIB} GiB free where models are downloaded to"
    found = f"{disk.free_bytes / _GIB:.1f} GiB free for {disk.folder}"
    remedy = "free some space, or set HF_HOME to a folder on a larger disk"
    return _judged(disk.free_bytes >= _MIN_DISK, "disk", expected, found, remedy)
