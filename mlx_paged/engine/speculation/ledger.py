"""Ledger: bounds the time that drafts may lose, even if all expectations are wrong."""

from __future__ import annotations

# Share of all steps that drafts may lose, and steps that they may lose before that adds up.
_SHARE = 0.01
_ADVANCE = 1.0
# Saved steps that later drafts may lose again.
_MOST = 16.0


class Ledger:
    """Counts what drafts save and lose. The unit is the time of a step without drafts.

    The choice of drafts trusts measured costs and past acceptance. If these are wrong, for example
    because the machine does other work now, drafts lose time. Once they have lost what they had
    saved and what they may lose, only drafts go on that could not lose more than has come in since.
    So all steps together take at most 1% longer than without drafts, and one step, and whatever the
    last step with drafts took longer than expected.
    """

    def __init__(self) -> None:
        self._balance = _ADVANCE

    @property
    def balance(self) -> float:
        """Steps that drafts may lose now."""
        return self._balance

    def passed(self, num_steps: float) -> None:
        """Notes a step that took as long as `num_steps` steps without drafts."""
        if self._balance < _ADVANCE:
            self._balance = min(_ADVANCE, self._balance + _SHARE * num_steps)

    def saved(self, num_steps: float) -> None:
        """Notes what a step saved while drafts were made; negative: lost."""
        self._balance = min(_MOST, self._balance + num_steps)
