"""Verdicts: which kernels may run on this machine, and how many rows whole steps may have."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mlx_paged import kernels
from mlx_paged.calibration.cache import Result
from mlx_paged.calibration.cases import (
    MLX,
    PIECE_TOKENS,
    STEP_ROWS,
    Needs,
    layer_text,
    product_jobs,
    product_rows,
)
from mlx_paged.errors import MlxPagedError
from mlx_paged.kernels import AllowedProduct, AttentionLayer

# A preferred kernel is replaced if another takes less than 1 / this of its time: timings vary.
_MARGIN = 1.1
# Kernels that run without calibration, because nothing else could do their work as fast. All others
# are parts of whole steps, and run only when they have been proven.
_ALWAYS = (
    *("data.h", "greedy.h", "draw.h", "lora.h", "quantized_pool.h", "thresholds.h"),
    "paged_",
)
# Kernels without a substitute.
_INDISPENSABLE = ("copy_strided", "fill_zero", "quantize_kv", "gather_quantized", "rotate_queries")


class RejectedKernelError(MlxPagedError, RuntimeError):
    """Calibration rejected a kernel that the model needs and that nothing can replace.

    Attributes:
        kernels: The kernels and why they were rejected.
    """

    def __init__(self, kernels: Mapping[str, str]) -> None:
        listed = "; ".join(f"{name} ({reason})" for name, reason in kernels.items())
        super().__init__(
            f"this GPU does not run a kernel that this model needs: {listed}. Run on the CPU with "
            "mx.set_default_device(mx.cpu), and report it with the output of `mlx-paged doctor "
            "--calibrate --json`"
        )
        self.kernels = dict(kernels)


@dataclass
class Verdicts:
    """Conclusions from the outcomes of calibration.

    Attributes:
        rejected: Reason by kernel: wrong, crashed, hung, or slower than another.
        proven: Kernels that gave MLX's results.
        step_rows: Maximum rows of a whole step.
        step_error: Why no step may run as a whole although its kernels are proven; None: it may.
        piece_tokens: Minimum tokens of context per work item of a decode; 0: the built-in number.
        products: Kernels of products outside of whole steps that took no longer than MLX's, with
            the rows for which they did.
        seconds: Measured seconds by job, for reports.
        tensor_units: True if kernels for tensor units may run if they are proven.
    """

    rejected: dict[str, str] = field(default_factory=dict)
    proven: set[str] = field(default_factory=set)
    step_rows: int = 0
    step_error: str | None = None
    piece_tokens: int = 0
    products: set[AllowedProduct] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)
    tensor_units: bool = False

    @classmethod
    def of(cls, results: Mapping[str, Result], needs: Needs) -> Verdicts:
        """Draws the conclusions for a model.

        Args:
            results: By job; jobs of other models count too, because kernels are the same.
        """
        verdicts = cls(tensor_units=needs.tensor_units)
        for job, result in results.items():
            if result.error is not None and not job.startswith(("time-step/", "time-products/")):
                for kernel in result.kernels:
                    verdicts.rejected.setdefault(kernel, result.error)
                if not result.kernels:  # every kernel was proven, but not together
                    verdicts.step_error = result.error
            elif result.error is None and not job.startswith("time-"):
                verdicts.proven.update(result.kernels)
            if result.seconds is not None:
                verdicts.seconds[job] = result.seconds
        verdicts.proven -= verdicts.rejected.keys()
        verdicts._reject_slow()
        verdicts.step_rows = verdicts._rows_of_steps(needs)
        verdicts.piece_tokens = verdicts._best_piece(needs)
        verdicts.products = verdicts._fast_products(needs)
        return verdicts

    def __str__(self) -> str:
        names = ", ".join(sorted(self.rejected))
        words = f"{len(self.proven)} kernels are right, {len(self.rejected)} are not used"
        words += f" ({names})" if names else ""
        steps = f"up to {self.step_rows} rows" if self.step_rows else "none"
        return f"{words}; whole steps: {steps}"

    def _reject_slow(self) -> None:
        """Rejects kernels that are preferred to a faster one. Jobs are in order of preference."""
        classes: dict[str, dict[str, float]] = {}
        for job, seconds in self.seconds.items():
            shape, _, kernel = job.rpartition("/")
            if shape.startswith("time-attention/") and kernel not in self.rejected:
                classes.setdefault(shape, {})[kernel] = seconds
        slow: dict[str, str] = {}
        best_anywhere: set[str] = set()
        for candidates in classes.values():
            best = min(candidates, key=candidates.__getitem__)
            for kernel, seconds in candidates.items():
                if kernel == best:
                    best_anywhere.add(kernel)
                    break  # those behind it are not preferred to it
                if seconds > _MARGIN * candidates[best]:
                    slow[kernel] = (
                        f"{seconds * 1e3:.3f} ms where {best} takes {candidates[best] * 1e3:.3f} ms"
                    )
                else:
                    best_anywhere.add(kernel)
                    break
        # A kernel serves several shapes, and stays if it is the best of any.
        self.rejected |= {k: reason for k, reason in slow.items() if k not in best_anywhere}

    def _rows_of_steps(self, needs: Needs) -> int:
        """The most rows up to which whole steps were never slower than MLX's graphs."""
        shapes = json.dumps([str(product) for product in needs.products], separators=(",", ":"))
        if self.step_error is not None:
            return 0
        allowed = 0
        for rows in STEP_ROWS:
            job = f"time-step/{needs.dtype}/{shapes}/{rows}"
            whole, graph = (self.seconds.get(f"{job}/{way}") for way in ("whole", "graph"))
            if rows > needs.step_rows or whole is None or graph is None or whole > graph:
                break
            allowed = rows
        return allowed

    def _best_piece(self, needs: Needs) -> int:
        """The length of pieces whose decodes took least time, in all layers together."""
        totals = dict.fromkeys(PIECE_TOKENS, 0.0)
        for layer in needs.layers:
            shape = f"time-split/{layer_text(layer)}/{needs.block_size}"
            seconds = {n: self.seconds.get(f"{shape}/{n}", math.inf) for n in PIECE_TOKENS}
            if seconds[0] < math.inf:  # this layer has kernels for it
                totals = {n: totals[n] + seconds[n] for n in PIECE_TOKENS}
        best = min(totals, key=totals.__getitem__)
        return best if totals[0] > _MARGIN * totals[best] else 0

    def _fast_products(self, needs: Needs) -> set[AllowedProduct]:
        """For each number of rows the proven kernel that took least time for a layer's products
        together, if MLX's took no less."""
        found: set[AllowedProduct] = set()
        for job, _, rows in product_jobs(needs):
            ways = {w: s for j, s in self.seconds.items() if (w := j.removeprefix(f"{job}/")) != j}
            theirs = ways.pop(MLX, -math.inf)
            ours = {kernel: s for kernel, s in ways.items() if kernel in self.proven}
            best = min(ours, key=ours.__getitem__, default=None)
            if best is not None and ours[best] <= theirs:
                found.add(AllowedProduct(best, *product_rows(rows)))
        return found

    @property
    def unproven(self) -> set[str]:
        """Kernels of whole steps that nothing has proven."""
        return {
            name
            for name, file in kernels.kernel_files().items()
            if not file.startswith(_ALWAYS) and name not in self.proven
        } - self.rejected.keys()

    def apply(self) -> None:
        """Makes this process follow the verdicts."""
        kernels.allow_tensor_kernels(self.tensor_units)
        kernels.reject_kernels({*self.rejected, *self.unproven})
        kernels.allow_step_rows(self.step_rows)
        kernels.allow_products(self.products)
        kernels.set_piece_tokens(self.piece_tokens)

    def require(self, layers: Iterable[AttentionLayer]) -> None:
        """Checks that every layer can run.

        Raises:
            RejectedKernelError: A rejected kernel has no substitute.
        """
        needed = set()
        for layer in layers:
            needed |= {"fill_zero", f"copy_strided_{32 if layer.dtype == 'float32' else 16}"}
            if layer.key_format:
                needed |= {
                    name
                    for name in self.rejected
                    if name.startswith(_INDISPENSABLE[2:]) and f"_{layer.dtype}_" in name
                }
        missing = {name: self.rejected[name] for name in sorted(needed) if name in self.rejected}
        if missing:
            raise RejectedKernelError(missing)
