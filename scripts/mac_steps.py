"""Runs the steps of .github/workflows/macos.yml, and keeps what explains a failure.

    python3 scripts/mac_steps.py facts
    python3 scripts/mac_steps.py run NAME --minutes 10 -- COMMAND...
    python3 scripts/mac_steps.py summary

`facts` prints the versions of macOS, Xcode, Metal's compiler and Python, the chip and what its GPU
can do. `run` writes a command's output to NAME.log, ends it at its limit after sampling the stacks
of its processes, and returns its exit status. `summary` copies the crash reports of the run beside
the logs, adds a table and the ends of failed logs to the job's summary, and exits with status 1 if
a step failed. Files go to the folder MAC_STEPS, or build/mac-steps. Needs only Python 3.9, because
`facts` runs before anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOGS = Path(os.environ.get("MAC_STEPS") or ROOT / "build/mac-steps")
FACTS = (
    ("macOS", "sw_vers"),
    ("kernel", "uname -a"),
    ("machine", "sysctl hw.model hw.memsize hw.ncpu machdep.cpu.brand_string kern.hv_vmm_present"),
    ("limits of GPU memory", "sysctl iogpu"),
    ("disk", "df -h /"),
    ("Xcode", "xcodebuild -version"),
    ("developer directory", "xcode-select --print-path"),
    ("macOS SDK", "xcrun --sdk macosx --show-sdk-version"),
    ("C++ compiler", "xcrun clang++ --version"),
    ("Metal compiler", "xcrun -sdk macosx metal --version"),
    ("Python", f"{sys.executable} --version"),
    ("displays", "system_profiler SPDisplaysDataType"),
    ("Metal device", f"xcrun swift {ROOT}/scripts/metal_device.swift"),
)
#: Where macOS writes crash reports: of programs, and of the GPU and the kernel.
REPORTS = (
    Path.home() / "Library/Logs/DiagnosticReports",
    Path("/Library/Logs/DiagnosticReports"),
)
#: macOS writes a crash report some seconds after the crash.
REPORT_DELAY_S = 10
TIMED_OUT = 124  # as timeout(1) has it
SUMMARY_LINES = 60  # of each failed log
SUMMARY_BYTES = 900_000  # GitHub drops a summary of more than 1 MiB


# --- Steps ----------------------------------------------------------------------------------------


def save(name: str, record: dict[str, Any]) -> None:
    LOGS.mkdir(parents=True, exist_ok=True)
    (LOGS / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")


def processes_of(group: int) -> list[int]:
    """Process ids of a process group."""
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,pgid="], capture_output=True, text=True, check=False
    )
    pairs = (line.split() for line in listed.stdout.splitlines())
    return [int(pair[0]) for pair in pairs if pair[1:] == [str(group)]]


def sample_stacks(name: str, group: int) -> None:
    """Writes the stacks of a hanging step, which only macOS's `sample` can read from outside."""
    if shutil.which("sample") is None:
        return
    for pid in processes_of(group)[:8]:
        command = ["sample", str(pid), "2", "-file", str(LOGS / f"{name}-{pid}.sample.txt")]
        try:
            subprocess.run(command, capture_output=True, timeout=30, check=False)
        except subprocess.TimeoutExpired:
            print(f"sample did not end for process {pid}", flush=True)


def run_step(name: str, minutes: float, command: list[str]) -> int:
    """Runs a command in a process group of its own.

    Returns:
        Its exit status, negative for a signal; 124 if it was ended at its limit.
    """
    record: dict[str, Any] = {"name": name, "command": command, "started": time.time()}
    save(name, record)  # without a status: GitHub may end the runner during the step
    print("+", *command, flush=True)
    env = {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    with (LOGS / f"{name}.log").open("wb") as log:
        try:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=env,
            )
        except OSError as error:
            log.write(f"{error}\n".encode())
            print(error, flush=True)
            save(name, {**record, "status": 127, "seconds": 0.0})
            return 127
        output = process.stdout
        assert output is not None

        def copy() -> None:
            while chunk := os.read(output.fileno(), 65536):
                log.write(chunk)
                log.flush()
                sys.stdout.buffer.write(chunk)
                sys.stdout.flush()

        # A thread, because a grandchild may keep the pipe open after the command has ended.
        reader = threading.Thread(target=copy, daemon=True)
        reader.start()
        try:
            status = process.wait(60 * minutes)
        except subprocess.TimeoutExpired:
            sample_stacks(name, process.pid)
            status = TIMED_OUT
        # macOS refuses to signal a group that has only zombies.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(5)
    save(name, {**record, "status": status, "seconds": time.time() - record["started"]})
    if status == TIMED_OUT:
        print(f"{name} was ended after {minutes:g} minutes", flush=True)
    return status


def facts() -> int:
    """Prints one section per fact. A missing tool is a fact, too."""
    LOGS.mkdir(parents=True, exist_ok=True)
    save("facts", {"name": "facts", "command": ["facts"], "started": time.time(), "status": 0})
    sections = []
    for title, command in FACTS:
        try:
            done = subprocess.run(
                command.split(), capture_output=True, text=True, timeout=45, check=False
            )
            told = (done.stdout + done.stderr).strip()
            told += f"\n(exit status {done.returncode})" * (done.returncode != 0)
        except (OSError, subprocess.TimeoutExpired) as error:
            told = str(error)
        sections.append(f"{title}\n  " + told.replace("\n", "\n  "))
        print(sections[-1], flush=True)
    (LOGS / "facts.log").write_text("\n".join(sections) + "\n")
    return 0


# --- Summary --------------------------------------------------------------------------------------


def reason_of(status: int | None) -> str:
    if status is None:
        return "did not end: the runner stopped it"
    if status == TIMED_OUT:
        return "ended at its limit"
    # A shell reports a signal as 128 plus its number.
    number = -status if status < 0 else status - 128
    try:
        return f"{signal.Signals(number).name}" if status else "passed"
    except ValueError:
        return f"exit status {status}"


def collect_reports(since: float) -> list[Path]:
    """Copies crash reports that were written after `since`."""
    target = LOGS / "crash-reports"
    copied = []
    for folder in REPORTS:
        for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
            try:
                if path.is_file() and path.stat().st_mtime >= since:
                    target.mkdir(parents=True, exist_ok=True)
                    copied.append(Path(shutil.copy(path, target / path.name)))
            except OSError as error:
                print(f"{path}: {error}")
    return copied


def end_of(log: Path, lines: int = SUMMARY_LINES) -> str:
    if not log.is_file():
        return "(no log)"
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]).replace("```", "'''")


def markdown(records: list[dict[str, Any]], reports: list[Path]) -> str:
    rows = ["| step | result | seconds |", "| --- | --- | --- |"]
    for record in records:
        seconds = record.get("seconds")
        cells = (record["name"], reason_of(record.get("status")), f"{seconds or 0:.0f}")
        rows.append("| " + " | ".join(cells) + " |")
    parts = ["\n".join(rows)]
    if reports:
        parts.append("Crash reports: " + ", ".join(f"`{path.name}`" for path in reports))
    for record in records:
        if record.get("status") != 0:
            end = end_of(LOGS / f"{record['name']}.log")
            parts.append(f"### End of {record['name']}.log\n\n```text\n{end}\n```")
    for path in reports[:5]:
        start = path.read_text(errors="replace")[:4000].replace("```", "'''")
        parts.append(f"### Start of {path.name}\n\n```text\n{start}\n```")
    parts.append(f"### Machine\n\n```text\n{end_of(LOGS / 'facts.log', 200)}\n```")
    return ("\n\n".join(parts) + "\n").encode()[:SUMMARY_BYTES].decode(errors="ignore")


def summary(expected: list[str]) -> int:
    """Writes the summary.

    Returns:
        1 if a step failed, or one of `expected` has not run; else 0.
    """
    records = [json.loads(path.read_text()) for path in LOGS.glob("*.json")]
    records.sort(key=lambda record: record["started"])
    if any(record.get("status") != 0 for record in records):
        time.sleep(REPORT_DELAY_S)
    reports = collect_reports(records[0]["started"] if records else 0.0)
    missing = [name for name in expected if name not in {r["name"] for r in records}]
    text = "".join(f"`{name}` has not run.\n\n" for name in missing) + markdown(records, reports)
    print(text)
    if target := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(target, "a") as file:
            file.write(text)
    return int(bool(missing) or any(record.get("status") != 0 for record in records))


def main() -> int:
    parser = argparse.ArgumentParser(description="The steps of the workflow for Macs.")
    commands = parser.add_subparsers(dest="verb", required=True)
    commands.add_parser("facts")
    step = commands.add_parser("run")
    step.add_argument("name")
    step.add_argument("--minutes", type=float, required=True)
    step.add_argument("command", nargs="+")
    commands.add_parser("summary").add_argument("expected", nargs="*")
    options = parser.parse_args()
    if options.verb == "facts":
        return facts()
    if options.verb == "summary":
        return summary(options.expected)
    status = run_step(options.name, options.minutes, options.command)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
