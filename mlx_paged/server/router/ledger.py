"""Ledger: charges clients for the tokens that the model processes report."""

from __future__ import annotations

import itertools
from weakref import WeakKeyDictionary, WeakValueDictionary

from mlx_paged.server.rate_limits import Budget


class Ledger:
    """Numbers clients' budgets, so that processes can report usage. Ignores dropped budgets."""

    def __init__(self) -> None:
        self._numbers: WeakKeyDictionary[Budget, int] = WeakKeyDictionary()
        self._budgets: WeakValueDictionary[int, Budget] = WeakValueDictionary()
        self._next = itertools.count(1)

    def number_of(self, budget: Budget) -> int:
        """Returns the account number of a budget. It never changes."""
        number = self._numbers.get(budget)
        if number is None:
            number = self._numbers[budget] = next(self._next)
            self._budgets[number] = budget
        return number

    def charge(self, number: int, num_tokens: int) -> None:
        """Charges an account for used tokens."""
        budget = self._budgets.get(number)
        if budget is not None:
            budget.charge(num_tokens)
