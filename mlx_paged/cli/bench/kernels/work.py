"""What the parts of the benchmark agree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mlx_paged.cli.bench.kernels.cases import VOCAB_SIZE, Case
from mlx_paged.cli.bench.kernels.reference import TOLERANCE, WrongResultError, relative_error
from mlx_paged.cli.bench.kernels.timing import Variant

OURS = "ours"
# A peer may round more coarsely than we do; beyond this it computes something else.
PEER_TOLERANCE = 0.1
# Elements of K (or of rows, or of words) that a check looks at: seconds in float64.
MOST_CHECKED = 1 << 25


@dataclass(frozen=True)
class Checked:
    """What a check looked at.

    Attributes:
        max_relative_error: of ours, of all rows that were checked; 0 where bits were compared.
        rows: so many were checked,
        of: of so many.
        peers: the same error of peers, by name.
    """

    max_relative_error: float
    rows: int
    of: int
    peers: dict[str, float]


@dataclass(frozen=True)
class Work:
    """One case, ready to be checked and timed.

    Attributes:
        bytes: read and written by one launch (`COUNTING` says which).
        flops: of one launch; 0: none to speak of.
        variants: ours first, then peers that do the same.
        check: compares all of them with the reference.
    """

    bytes: int
    flops: int
    variants: Sequence[Variant]
    check: Callable[[], Checked]


COUNTING = {
    "paged_attention": "K and V of every token that some row sees, once for each sequence; "
    "queries read and results written. Partial results of split contexts are not counted",
    "write_kv": "K and V of all tokens of all contexts, read and written",
    "copy_blocks": "K and V of half of the blocks, read, and of the other half, written",
    "gather_kv": "K and V of all tokens read; dense K and V written, padding included",
    "rope": "rows of all query heads read and written, and their rotations read",
    "rms_norm": "rows read and written, and the weight read",
    "silu_mul": "two inputs read and one written",
    "greedy_tokens": f"logits read, {VOCAB_SIZE} a row",
    "linear": "the square weight, inputs and outputs, once each",
}


def require_close(
    case: Case, found: dict[str, np.ndarray], expected: np.ndarray
) -> tuple[float, dict[str, float]]:
    """Error of ours and of peers, each a ``[rows, ...]`` array; wrong results raise."""
    errors = {name: relative_error(actual, expected) for name, actual in found.items()}
    for name, error in errors.items():
        limit = TOLERANCE[case.dtype] if name == OURS else PEER_TOLERANCE
        if not error <= limit:
            who = "" if name == OURS else f"the peer {name}: "
            raise WrongResultError(
                case, f"{who}a row is off by {error:.1e} of its norm, and {limit:.0e} is allowed"
            )
    return errors.pop(OURS), errors


def require_same(case: Case, what: str, actual: np.ndarray, expected: np.ndarray) -> None:
    """Words that must be the same, along the first axis."""
    if actual.shape != expected.shape:
        raise WrongResultError(case, f"{what} are of shape {actual.shape}, not {expected.shape}")
    differ = (actual != expected).reshape(len(expected), -1).any(axis=1)
    if differ.any():
        raise WrongResultError(
            case, f"{int(differ.sum())} of {len(expected)} {what} differ, first {differ.argmax()}"
        )
