"""Limits on the size of a grammar."""

from __future__ import annotations

from llguidance import LLParserLimits

#: Real schemas reach llguidance's own limits: 700 optional properties, enums of long texts. With
#: these, the slowest steps of a grammar take some 50 ms. The time of a row grows with the square of
#: its items, and all streams wait for it: 18,000 (3,000 optional parts in a sequence) take 0.3 s.
LIMITS = LLParserLimits(
    max_items_in_row=8_000,
    step_max_items=500_000,
    step_lexer_fuel=1_000_000,
    initial_lexer_fuel=4_000_000,
    max_grammar_size=2_000_000,
    verbose_errors=False,
)

#: CPU seconds allowed for the first mask; llguidance does not count the items of that one.
#: Taking a token after that takes half as long, and holds the interpreter's lock.
MAX_FIRST_MASK = 0.2

# Words of llguidance's errors about them.
_WORDS = ("too many", "max is", "limit", "fuel", "too large", "too complex", "exceeded", "too big")


def is_limit(error: str) -> bool:
    """True if llguidance reports that a limit was reached."""
    return any(word in error for word in _WORDS)
