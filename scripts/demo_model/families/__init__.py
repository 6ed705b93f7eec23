"""Generated requests: families of small tasks whose words and code vary together.

A family crosses a few word lists ("the sum of" x "the even numbers of a list"), so that the model
learns to compose parts instead of recalling whole answers.
"""

from __future__ import annotations

from ..pairs import Pair
from .checks import checks_and_picks, series
from .lists import mappings, numbers_in_a_list
from .measures import conversions, geometry
from .records import orders, records
from .text import characters, joining, words

# In the order of training.
FAMILIES = (
    numbers_in_a_list,
    words,
    characters,
    mappings,
    joining,
    conversions,
    geometry,
    orders,
    records,
    series,
    checks_and_picks,
)


def all_families() -> list[Pair]:
    """Returns every generated pair."""
    return [pair for family in FAMILIES for pair in family()]
