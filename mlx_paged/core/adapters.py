"""AdapterSlots: tracks which adapter each device slot holds and how many running sequences use it.

Slots are numbered from 1; 0 is the base model. A slot keeps its adapter after its last sequence
ends, until another adapter needs a slot and evicts the least recently used one. Slots of running
sequences are never evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from mlx_paged.errors import IntegrityError


@dataclass(slots=True)
class _Slot:
    number: int  # from 1
    num_sequences: int = 0  # running sequences that use it


class AdapterSlots:
    """Assigns adapters to the slots of the device.

    Args:
        num_slots: Maximum number of different adapters among the running sequences.

    Attributes:
        num_in_use: Slots that running sequences use.
        num_evictions: Number of evictions so far.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots, 0, -1))  # never used
        self._slots: dict[Hashable, _Slot] = {}
        self._by_number: dict[int, Hashable] = {}
        self._idle: OrderedDict[Hashable, None] = OrderedDict()  # least recently used first
        self.num_evictions = 0

    @property
    def num_in_use(self) -> int:
        return len(self._slots) - len(self._idle)

    @property
    def has_room(self) -> bool:
        """True if an adapter without a slot could take one."""
        return bool(self._free or self._idle)

    def can_take(self, adapter: Hashable) -> bool:
        """True if a sequence with this adapter could run now."""
        return self.has_room or adapter in self._slots

    def take(self, adapter: Hashable) -> int:
        """Returns the adapter's slot for one more running sequence; evicts another if needed."""
        slot = self._slots.get(adapter)
        if slot is None:
            slot = _Slot(self._free.pop() if self._free else self._evict())
            self._slots[adapter], self._by_number[slot.number] = slot, adapter
        else:
            self._idle.pop(adapter, None)
        slot.num_sequences += 1
        return slot.number

    def _evict(self) -> int:
        adapter, _ = self._idle.popitem(last=False)
        self.num_evictions += 1
        return self._slots.pop(adapter).number

    def release(self, number: int) -> None:
        """Ends one sequence's use of a slot. The slot keeps its adapter."""
        adapter = self._by_number[number]
        slot = self._slots[adapter]
        slot.num_sequences -= 1
        if not slot.num_sequences:
            self._idle[adapter] = None

    def adapter_in(self, number: int) -> Hashable:
        """Returns the adapter that a slot holds."""
        return self._by_number[number]

    def check_integrity(self, used: list[int]) -> None:
        """Raises `IntegrityError` if the slots are not those of the running sequences.

        Args:
            used: The slot of each running sequence that has an adapter.
        """
        counts = {slot.number: slot.num_sequences for slot in self._slots.values()}
        if any(used.count(number) != count for number, count in counts.items()) or not (
            counts.keys() >= set(used)
        ):
            raise IntegrityError(f"running sequences use adapter slots {used}, counted as {counts}")
        if sorted([*counts, *self._free]) != list(range(1, self._num_slots + 1)):
            raise IntegrityError(
                f"used slots {sorted(counts)} and free slots {self._free} must be all of "
                f"1 to {self._num_slots}"
            )
        idle = {adapter for adapter, slot in self._slots.items() if not slot.num_sequences}
        if idle != set(self._idle):
            raise IntegrityError("the idle adapters are not those without a running sequence")
