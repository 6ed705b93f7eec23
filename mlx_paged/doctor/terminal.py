"""Prints a report on a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mlx_paged.calibration.table import lines
from mlx_paged.doctor.checks import Status
from mlx_paged.doctor.fits import Fit
from mlx_paged.doctor.machine import Gpu, Machine
from mlx_paged.doctor.report import Report, without_home

_MARKS = {
    Status.OK: "[green]ok[/green]",
    Status.SKIPPED: "[dim]skipped[/dim]",
    Status.WARNING: "[yellow]warning[/yellow]",
    Status.BROKEN: "[bold red]BROKEN[/bold red]",
}
_ENDINGS = {
    Status.OK: "[green]Nothing is wrong.[/green]",
    Status.WARNING: "[yellow]It works, but not as well as it could.[/yellow]",
    Status.BROKEN: "[bold red]Something is broken.[/bold red]",
}
_GIB = 1 << 30


def show(report: Report, console: Console) -> None:
    """Prints machine, checks, models that fit, and remedies."""
    _section(console, "[bold]Machine[/bold]", machine_facts(report.machine))
    _section(console, "[bold]Software[/bold]", _software_facts(report))
    checks = ((_MARKS[f.status], escape(f.check), f.found) for f in report.findings)
    _section(console, "[bold]Checks[/bold]", checks)
    if report.calibration is not None:
        found = (tuple(line.split(": ", 1)) for line in lines(report.calibration))
        _section(console, "[bold]Kernels on this GPU[/bold]", found)
    if report.memory is not None:
        _fits(console, report)
    for f in report.findings:
        if f.remedy:
            rows = [("expected", f.expected), ("found", f.found), ("remedy", f.remedy)]
            _section(console, f"{_MARKS[f.status]}  [bold]{escape(f.check)}[/bold]", rows)
    console.print(_ENDINGS[report.verdict])


def _section(console: Console, title: str, rows: Iterable[tuple[str, ...]]) -> None:
    """A title and a table; the last column is plain text, and the others contain markup."""
    console.print(title)
    table = Table.grid(padding=(0, 2))
    for *cells, text in rows:
        table.add_row("", *cells, escape(without_home(text)))
    for column in table.columns:
        column.no_wrap = column is not table.columns[-1]
        column.overflow = "fold"
    console.print(table)
    console.print()


def machine_facts(machine: Machine) -> list[tuple[str, str]]:
    """Name and value, in words."""
    cpus, logical = machine.usable_cpus, machine.logical_cores
    cores = f"{logical or 'unknown'}"
    if cpus is not None and logical is not None and cpus < logical:
        cores += f"; this process gets {cpus:g}"
    memory = "unknown"
    if machine.memory_bytes is not None:
        memory = f"{machine.memory_bytes / _GIB:.1f} GiB"
    if machine.available_bytes is not None:
        memory += f", {machine.available_bytes / _GIB:.1f} GiB available"
    if machine.limits.memory_bytes is not None:
        memory += f", limited to {machine.limits.memory_bytes / _GIB:.1f} GiB"
    return [
        ("system", f"{machine.system}, {machine.architecture}"),
        ("chip", machine.chip or machine.architecture),
        ("cores", cores),
        ("memory", memory),
        *(("GPU", _gpu(gpu)) for gpu in machine.gpus or [Gpu("none found")]),
    ]


def _gpu(gpu: Gpu) -> str:
    words = [
        gpu.name,
        f"{gpu.memory_bytes / _GIB:.0f} GiB" if gpu.memory_bytes else "",
        f"compute capability {gpu.compute_capability}" if gpu.compute_capability else "",
        f"driver {gpu.driver}" if gpu.driver else "",
    ]
    return ", ".join(filter(None, words))


def _software_facts(report: Report) -> list[tuple[str, str]]:
    software = report.software
    rows = [
        ("Python", f"{software.python}, {software.executable}"),
        ("packages", ", ".join(" ".join(pair) for pair in software.packages.items())),
    ]
    if report.extension is not None:
        build = report.extension["build_info"]
        words = (
            f"for {', '.join(build['backends'].split())}; by {build['compiler']} with MLX "
            f"{build['mlx_version']}, nanobind {build['nanobind_version']}; "
            f"{build['simd']} kernels on {build['num_threads']} threads"
        )
        rows.append(("extension", words))
    if report.mlx is not None:
        words = f"{report.mlx['version']}, default device {report.mlx['default_device']}"
        rows.append(("MLX", words))
    if software.environment:
        rows.append(("environment", " ".join(map("=".join, software.environment.items()))))
    return rows


def _fits(console: Console, report: Report) -> None:
    assert report.memory is not None
    where = "GPU" if report.memory["on_gpu"] else "CPU, with keys and values in float32"
    gib = report.memory["device_bytes"] / _GIB
    console.print(f"[bold]What fits[/bold] in {gib:.1f} GiB on the {where}")
    words = "Size of the weights in each precision, and the tokens of keys and values that fit too."
    console.print(f"  [dim]{words}[/dim]")
    models: dict[str, list[Fit]] = {}
    for fit in report.fits:
        models.setdefault(fit.model, []).append(fit)
    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="dim")
    table.add_column("  model")
    for name in ("KV a token", *(fit.precision for fit in models[report.fits[0].model])):
        table.add_column(name, justify="right")
    for model, fits in models.items():
        cells = [
            f"[dim]{fit.weight_bytes / _GIB:.1f} GiB[/dim]"
            f"  {f'{fit.num_tokens:,}' if fit.num_blocks else '-':>9}"
            for fit in fits
        ]
        table.add_row(f"  {model}", f"{fits[0].kv_bytes_per_token / 1024:.0f} KiB", *cells)
    console.print(table)
    for name in ("int8", "int8_k_int4_v"):
        more = [f.quantized_tokens[name] / f.num_tokens for f in report.fits if f.num_tokens]
        if more:
            words = f"--kv-cache-dtype {name}: {min(more):.2f} to {max(more):.2f} times the tokens."
            console.print(f"  [dim]{words}[/dim]")
    console.print()
