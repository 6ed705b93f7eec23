"""An examination on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mlx_paged.doctor.examine import Examination
from mlx_paged.doctor.finding import Finding, Status
from mlx_paged.doctor.fits import Fit
from mlx_paged.doctor.jobs import EXTENSION, MLX
from mlx_paged.doctor.machine import Gpu, Machine
from mlx_paged.doctor.report import without_home

_MARKS = {
    Status.OK: "[green]ok[/green]",
    Status.NOTE: "[blue]note[/blue]",
    Status.SKIPPED: "[dim]skipped[/dim]",
    Status.WARNING: "[yellow]warning[/yellow]",
    Status.BROKEN: "[bold red]BROKEN[/bold red]",
}
_GIB = 1 << 30


def show(examination: Examination, console: Console) -> None:
    """Machine, checks, what fits, and at the end what to do."""
    _facts(console, "Machine", machine_facts(examination.machine))
    _facts(console, "Software", _software_facts(examination))
    _checks(console, examination)
    if examination.fits:
        _fits(console, examination)
    _ending(console, examination)


def machine_facts(machine: Machine) -> list[tuple[str, str]]:
    """Name and value, in words."""
    cores = ", ".join(f"{g.count} {g.name.lower()}" for g in machine.core_groups) or "unknown"
    if machine.logical_cores and machine.logical_cores != machine.physical_cores:
        cores += f", {machine.logical_cores} threads"
    cpus, logical = machine.usable_cpus, machine.logical_cores
    if cpus is not None and logical is not None and cpus < logical:
        cores += f"; this process gets {cpus:g}"
    chip = machine.chip or "unknown"
    rows = [
        ("system", f"{machine.system}, {machine.architecture}"),
        ("chip", f"{chip} ({machine.model})" if machine.model else chip),
        ("cores", cores),
        ("memory", _memory(machine)),
        *(("GPU", _gpu(gpu)) for gpu in machine.gpus),
    ]
    if not machine.gpus:
        rows.append(("GPU", "none found"))
    if machine.cuda_version:
        rows.append(("CUDA", f"{machine.cuda_version} at most, by the driver"))
    if machine.published:
        speed = machine.published.bandwidth
        words = "not confirmed" if speed is None else f"{speed:g} GB/s"
        rows.append(("published", f"memory bandwidth {words} ({machine.published.source})"))
    elif machine.is_mac:
        rows.append(("published", "memory bandwidth unknown: this chip is not in the table"))
    return rows


def _memory(machine: Machine) -> str:
    if machine.memory_bytes is None:
        return "unknown"
    words = f"{machine.memory_bytes / _GIB:.1f} GiB"
    if machine.available_bytes is not None:
        words += f", {machine.available_bytes / _GIB:.1f} GiB available"
    if machine.limits.memory_bytes is not None:
        words += f", limited to {machine.limits.memory_bytes / _GIB:.1f} GiB"
    return words


def _gpu(gpu: Gpu) -> str:
    parts = [gpu.name]
    if gpu.cores:
        parts.append(f"{gpu.cores} cores")
    if gpu.memory_bytes:
        parts.append(f"{gpu.memory_bytes / _GIB:.0f} GiB")
    if gpu.compute_capability:
        parts.append(f"compute capability {gpu.compute_capability}")
    if gpu.driver:
        parts.append(f"driver {gpu.driver}")
    return ", ".join(parts)


def _software_facts(e: Examination) -> list[tuple[str, str]]:
    software = e.software
    versions = [f"{name} {version}" for name, version in software.packages.items()]
    rows = [
        ("Python", f"{software.python}, {without_home(software.executable)}"),
        ("packages", ", ".join(versions)),
    ]
    if extension := e.value(EXTENSION):
        build = extension["build_info"]
        rows.append(
            (
                "extension",
                f"for {', '.join(build['backends'].split())}; by {build['compiler']} with MLX "
                f"{build['mlx_version']}, nanobind {build['nanobind_version']}; "
                f"{build['simd']} kernels on {build['num_threads']} threads",
            )
        )
    if mlx := e.value(MLX):
        rows.append(("MLX", f"{mlx['version']}, default device {mlx['default_device']}"))
    if software.environment:
        settings = " ".join(f"{name}={value}" for name, value in software.environment.items())
        rows.append(("environment", settings))
    return rows


def _facts(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    console.print(f"[bold]{title}[/bold]")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(f"  {name}", escape(value))
    console.print(table)
    console.print()


def _checks(console: Console, e: Examination) -> None:
    console.print("[bold]Checks[/bold]")
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_column(overflow="fold")
    for finding in e.findings:
        table.add_row(f"  {_MARKS[finding.status]}", escape(finding.check), escape(finding.found))
    console.print(table)
    console.print()


def _fits(console: Console, e: Examination) -> None:
    assert e.memory is not None
    where = "GPU" if e.memory.on_gpu else "CPU"
    console.print(
        f"[bold]What fits[/bold] in {e.memory.device_bytes / _GIB:.1f} GiB on the {where}"
    )
    console.print(
        "  [dim]Weights, and tokens of keys and values beside them, by the engine's own rule.\n"
        "  Activations are estimated here; the engine measures them.[/dim]"
    )
    by_model: dict[str, list[Fit]] = {}
    for fit in e.fits:
        by_model.setdefault(fit.model, []).append(fit)
    precisions = [fit.precision for fit in next(iter(by_model.values()))]
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column("  model", header_style="dim")
    table.add_column("KV a token", justify="right", header_style="dim")
    for precision in precisions:
        table.add_column(precision, justify="right", header_style="dim")
    for model, fits in by_model.items():
        cells = [_tokens(fit) for fit in fits]
        table.add_row(f"  {model}", f"{fits[0].kv_bytes_per_token / 1024:.0f} KiB", *cells)
    console.print(table)
    if not e.memory.on_gpu:
        console.print("  [dim]Quantised weights are dequantised to float32 on the CPU.[/dim]")
    console.print()


def _tokens(fit: Fit) -> str:
    weights = f"[dim]{fit.weight_bytes / _GIB:.1f} GiB[/dim]"
    return f"{weights}  {fit.num_tokens:>9,}" if fit.num_blocks else f"{weights}  {'-':>9}"


def _ending(console: Console, e: Examination) -> None:
    for finding in e.findings:
        if finding.remedy:
            _explain(console, finding)
    words = {
        Status.OK: "[green]Nothing is wrong.[/green]",
        Status.WARNING: "[yellow]It works, but not as well as it could.[/yellow]",
        Status.BROKEN: "[bold red]Something is broken.[/bold red]",
    }
    console.print(words[e.verdict])


def _explain(console: Console, finding: Finding) -> None:
    console.print(f"{_MARKS[finding.status]}  [bold]{escape(finding.check)}[/bold]")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in (
        ("expected", finding.expected),
        ("found", finding.found),
        ("remedy", finding.remedy),
    ):
        table.add_row(f"  {name}", escape(value))
    console.print(table)
    console.print()
