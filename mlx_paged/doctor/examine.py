"""Looks at everything, and puts it together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_paged.demo import model_path
from mlx_paged.doctor import (
    capture,
    check_machine,
    check_runtime,
    check_software,
    hardware,
    isolation,
    jobs,
    software,
)
from mlx_paged.doctor.finding import Finding, Status, verdict
from mlx_paged.doctor.fits import Fit, Memory, fits
from mlx_paged.doctor.isolation import Outcome, Runner
from mlx_paged.doctor.machine import Machine
from mlx_paged.doctor.shapes import WELL_KNOWN, embedded
from mlx_paged.doctor.software import Software


@dataclass(frozen=True)
class Examination:
    """All that is known.

    Attributes:
        outcomes: Of the jobs, by name.
        memory: What the engine counts on; None where MLX or the extension does not load.
        fits: Empty where `memory` is None.
    """

    machine: Machine
    software: Software
    outcomes: Mapping[str, Outcome]
    memory: Memory | None
    fits: tuple[Fit, ...]
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Status:
        """The worst finding's status: ok, warning or broken."""
        return verdict(self.findings)

    @property
    def exit_status(self) -> int:
        """1 where something is broken, else 0."""
        return int(self.verdict is Status.BROKEN)

    def value(self, job: str) -> Any:
        """A job's answer; None where it failed or did not run."""
        outcome = self.outcomes.get(job)
        return None if outcome is None else outcome.value


@dataclass(frozen=True)
class Sources:
    """Where the facts come from; tests put their own in."""

    captures: Callable[[], capture.Captures] = capture.take
    software: Callable[[], Software] = software.installed
    run: Runner = isolation.run_in_child
    on_phase: Callable[[str], object] = field(default=lambda phase: None)


def examine(sources: Sources | None = None) -> Examination:
    """Looks at this machine and installation. Takes some seconds; raises nothing on purpose.

    Args:
        sources: where the facts come from; None: this machine, with jobs in a child process.
    """
    ask = sources or Sources()
    ask.on_phase("the machine")
    machine = hardware.machine(ask.captures())
    installed = ask.software()
    ask.on_phase("MLX and the extension")
    outcomes = dict(ask.run([jobs.MLX, jobs.EXTENSION]))
    loads = outcomes[jobs.MLX].error is None and outcomes[jobs.EXTENSION].error is None
    if loads:
        devices = _devices(outcomes)
        ask.on_phase("memory")
        outcomes.update(ask.run([jobs.MEMORY, *(f"cases/{device}" for device in devices)]))
        ask.on_phase("every primitive")
        cases = [case for d in devices for case in outcomes[f"cases/{d}"].value or ()]
        outcomes.update(ask.run(cases))
        ask.on_phase("speed")
        outcomes.update(ask.run([jobs.MATMUL, *(f"bandwidth/{device}" for device in devices)]))

    memory = outcomes[jobs.MEMORY].value if loads else None
    counted = _memory(memory) if memory else None
    shapes = (embedded(model_path()), *WELL_KNOWN)
    fitting = tuple(fits(shapes, counted)) if counted else ()
    build = outcomes[jobs.EXTENSION].value["build_info"] if loads else None
    findings = [
        *check_software.check(installed, on_mac=machine.is_mac),
        *check_runtime.check(outcomes, machine),
        *check_machine.check(machine, installed, build, memory),
        *_memory_finding(outcomes, fitting),
    ]
    return Examination(machine, installed, outcomes, counted, fitting, tuple(findings))


def _devices(outcomes: Mapping[str, Outcome]) -> list[str]:
    """ "cpu", and "gpu" where MLX has one by default and this build has kernels for it."""
    backends = outcomes[jobs.EXTENSION].value["build_info"]["backends"].split()
    has_gpu = outcomes[jobs.MLX].value["default_device"] == "gpu"
    return ["cpu", *(["gpu"] if has_gpu and {"metal", "cuda"} & set(backends) else [])]


def _memory(answer: Mapping[str, Any]) -> Memory:
    return Memory(answer["on_gpu"], answer["device_bytes"], answer["utilization"])


def _memory_finding(outcomes: Mapping[str, Outcome], fitting: tuple[Fit, ...]) -> list[Finding]:
    name, expected = "memory for models", "room for the embedded model and its keys and values"
    outcome = outcomes.get(jobs.MEMORY)
    if outcome is None:
        return [Finding(name, Status.SKIPPED, expected, "MLX or the extension does not load")]
    if outcome.error is not None:
        remedy = "report it with the output of `mlx-paged doctor --json`"
        return [Finding(name, Status.BROKEN, expected, outcome.error, remedy)]
    smallest = fitting[0]
    if smallest.num_blocks == 0:
        remedy = "give the process more memory, or close what else uses it"
        return [Finding(name, Status.BROKEN, expected, smallest.reason, remedy)]
    models = len({fit.model for fit in fitting if fit.num_blocks})
    of = len({fit.model for fit in fitting})
    found = (
        f"{smallest.num_blocks:,} blocks of {smallest.block_size} tokens for the embedded model; "
        f"{models} of {of} models of the table fit in some precision"
    )
    return [Finding(name, Status.OK, expected, found)]
