"""Calibrates a model's kernels within a time limit, or takes what is known of this machine."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from mlx_paged import kernels
from mlx_paged.calibration import cases, child
from mlx_paged.calibration.cache import Cache, Result
from mlx_paged.calibration.cases import Needs
from mlx_paged.calibration.verdicts import Verdicts
from mlx_paged.child_jobs import Outcome, run_in_child

logger = logging.getLogger(__name__)

# Seconds that the start of an engine may take longer, and that a job may take. Metal compiles a
# kernel in a fraction of a second, and macOS ends a GPU's work that hangs after a few.
SECONDS = 10.0
SECONDS_PER_JOB = 5.0
# Module of the child process; the tests' simulator has its own.
MODULE = child.__name__

Run = Callable[..., Mapping[str, Outcome]]


class _CannotStart(Exception):
    """The child process ended before its first job."""


def calibrate(
    needs: Needs,
    cache: Cache,
    *,
    anew: bool = False,
    seconds: float | None = None,
    seconds_per_job: float | None = None,
    run: Run = run_in_child,
    on_job: Callable[[str], object] = lambda job: None,
) -> Verdicts:
    """Checks and times what this machine's cache does not have, and applies the verdicts.

    Ctrl-C ends it, and keeps the outcomes so far. Jobs that do not fit the limit run at the next
    start. Until then attention uses its kernels, and whole steps do not.

    Args:
        anew: Ignores the cache and replaces it.
        seconds: Limit for everything; None: `SECONDS`.
        seconds_per_job: None: `SECONDS_PER_JOB`.
        run: See `child_jobs.run_in_child`.
        on_job: Called with each job that begins.
    """
    seconds = SECONDS if seconds is None else seconds
    seconds_per_job = SECONDS_PER_JOB if seconds_per_job is None else seconds_per_job
    results = {} if anew else cache.load()
    verdicts = Verdicts.of(results, needs)
    if not anew and not _missing(needs, results, verdicts):
        verdicts.apply()
        return verdicts
    deadline = time.monotonic() + seconds
    with cache.locked(seconds):
        results = {} if anew else cache.load()  # another process may have calibrated meanwhile
        session = _Session(needs, cache, results, seconds_per_job, run, on_job)
        verdicts = session.calibrate(deadline, seconds)
    verdicts.apply()
    return verdicts


def take_known(needs: Needs, cache: Cache) -> Verdicts:
    """Applies what the cache knows, without running anything."""
    verdicts = Verdicts.of(cache.load(), needs)
    verdicts.apply()
    return verdicts


def _missing(needs: Needs, results: Mapping[str, Result], verdicts: Verdicts) -> list[str]:
    """The jobs that have no outcome. Checks come first: only right kernels are timed."""

    def reject(names: set[str]) -> None:
        kernels.reject_kernels({*verdicts.rejected, *names})

    kernels.allow_tensor_kernels(needs.tensor_units)
    reject(set())
    jobs = cases.checks(needs, kernels.attention_kernel)
    missing = [job for job in jobs if job not in results]
    if not missing:
        jobs = cases.timings(needs, kernels.attention_kernel, reject)
        missing = [job for job in jobs if job not in results]
    return missing


class _Session:
    """One calibration, which runs jobs until none is missing or the time is over."""

    def __init__(
        self,
        needs: Needs,
        cache: Cache,
        results: dict[str, Result],
        seconds_per_job: float,
        run: Run,
        on_job: Callable[[str], object],
    ) -> None:
        self.needs, self.cache, self.results = needs, cache, results
        self.seconds_per_job, self.run, self.on_job = seconds_per_job, run, on_job
        self.announced: dict[str, tuple[str, ...]] = {}

    def calibrate(self, deadline: float, seconds: float) -> Verdicts:
        verdicts = Verdicts.of(self.results, self.needs)
        first = True
        try:
            while jobs := _missing(self.needs, self.results, verdicts):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                if first:
                    first = False
                    logger.info("calibrating this machine's kernels, at most %.0f s", seconds)
                before = len(self.results)
                self._run(jobs, left)
                verdicts = Verdicts.of(self.results, self.needs)
                if len(self.results) == before:
                    break
        except (_CannotStart, OSError) as reason:
            logger.warning("kernels could not be calibrated: %s", reason)
        finally:  # also after Ctrl-C, so that the job under way is not held against its kernels
            if not first:
                self.cache.save(self.results)
        if not first:
            took = seconds - (deadline - time.monotonic())
            logger.info("calibrated in %.1f s: %s", took, verdicts)
        return verdicts

    def _known(self) -> list[str]:
        """The first job of a child, which tells it the outcomes so far."""
        verdicts = Verdicts.of(self.results, self.needs)
        known = {
            "rejected": sorted(verdicts.rejected),
            "proven": sorted(verdicts.proven),
            "tensor_units": self.needs.tensor_units,
        }
        return [f"{child.KNOWN}/{json.dumps(known)}"]

    def _run(self, jobs: list[str], seconds: float) -> None:
        self.run(
            MODULE,
            jobs,
            seconds_per_job=self.seconds_per_job,
            seconds_to_start=seconds,
            seconds=seconds,
            first=self._known,
            on_begin=self._begin,
            on_end=self._end,
        )

    def _begin(self, job: str, about: Any) -> None:
        if about is None:
            self.on_job(job)
            self.announced[job] = ()
        else:
            self.announced[job] = tuple(about)
            self.cache.save(self.results, running=(job, self.announced[job]))

    def _end(self, job: str, outcome: Outcome) -> None:
        if job not in self.announced:
            raise _CannotStart(outcome.error)
        announced, value = self.announced[job], outcome.value or {}
        if "unsupported" in value:
            announced = ()
        self.results[job] = Result(announced, outcome.error, value.get("seconds"))
