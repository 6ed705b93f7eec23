"""How large a grammar may be."""

from __future__ import annotations

from llguidance import LLParserLimits

#: Real schemas reach llguidance's own limits: 700 optional properties, enums of long texts. With
#: these, the slowest steps of a grammar take some 50 ms.
LIMITS = LLParserLimits(
    max_items_in_row=32_000,
    step_max_items=500_000,
    step_lexer_fuel=1_000_000,
    initial_lexer_fuel=4_000_000,
    max_grammar_size=2_000_000,
    verbose_errors=False,
)

# Words of llguidance's errors about them.
_WORDS = ("too many", "max is", "limit", "fuel", "too large", "too complex", "exceeded", "too big")


def is_limit(error: str) -> bool:
    """Whether an error of llguidance is about a limit."""
    return any(word in error for word in _WORDS)
