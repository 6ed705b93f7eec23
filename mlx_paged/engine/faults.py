"""Classifies and describes the faults of steps."""

from __future__ import annotations

import math
import threading

# Reasons why a sequence got no token (`ModelRunner.read`).
NOT_A_NUMBER = "its logits are not numbers (NaN)"
INFINITE = "its logits are infinite"
NO_PERMITTED_TOKEN = (
    "no token may follow: its grammar, token mask, allowed_token_ids, bad_words and min_tokens "
    "leave none"
)
HIDDEN_NOT_FINITE = "its hidden states are not finite (NaN or infinite)"
OVERFLOW = "its logits overflow with its penalties"

#: Faults of the model, after which its keys and values may be wrong too.
POISONS = frozenset({NOT_A_NUMBER, INFINITE, HIDDEN_NOT_FINITE})


def why_no_token(model_largest: float, largest: float) -> str:
    """Returns why a row of logits yields no token.

    Args:
        model_largest: The row's largest logit before edits, or NaN.
        largest: The row's largest logit after edits.
    """
    if math.isnan(model_largest):
        return NOT_A_NUMBER
    if math.isinf(model_largest):
        return INFINITE
    return NO_PERMITTED_TOKEN if largest == -math.inf else OVERFLOW


def is_interrupt(error: BaseException) -> bool:
    """True if the user pressed Ctrl-C, which Python raises only on the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    return isinstance(error, KeyboardInterrupt) and is_main


def reason_of(error: BaseException) -> str:
    """Returns one line about an error, for the caller."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
