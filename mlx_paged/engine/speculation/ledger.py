"""Ledger: bounds the time that drafts may lose, even if all estimates are wrong."""

from __future__ import annotations

# Share of all steps that drafts may lose, and steps that they may lose before that adds up.
_SHARE = 0.01
_ADVANCE = 1.0
# Saved steps that later drafts may lose again.
_MAX_BALANCE = 16.0


class Ledger:
    """Counts what drafts save and lose. The unit is the time of a step without drafts.

    The choice of drafts relies on measured costs and past acceptance. If these are wrong, for
    example because the machine now does other work, drafts lose time. Once they have lost their
    savings and their allowance, only drafts that cannot lose more than the balance are verified. So
    all steps together take at most 1% longer than without drafts, plus one step, plus the time by
    which the last step with drafts exceeded its estimate.
    """

    def __init__(self) -> None:
        self._balance = _ADVANCE

    @property
    def balance(self) -> float:
        """Steps that drafts may lose now."""
        return self._balance

    def passed(self, num_steps: float) -> None:
        """Records a step that took as long as `num_steps` steps without drafts."""
        if self._balance < _ADVANCE:
            self._balance = min(_ADVANCE, self._balance + _SHARE * num_steps)

    def saved(self, num_steps: float) -> None:
        """Records the time that a step with drafts saved; negative: lost."""
        self._balance = min(_MAX_BALANCE, self._balance + num_steps)
