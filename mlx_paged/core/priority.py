"""Priority: chooses running sequences to preempt for waiting ones of a higher class.

A sequence's class is the first component of its service order.
"""

from __future__ import annotations

from collections.abc import Iterator

from mlx_paged.core.adapters import AdapterSlots
from mlx_paged.core.admission import Admission
from mlx_paged.core.config import SchedulerConfig
from mlx_paged.core.queues import SequenceQueue, WaitingQueue
from mlx_paged.core.request import Sequence
from mlx_paged.core.step_builder import StepBuilder


class Priority:
    """Chooses the sequences to preempt.

    Args:
        admission: Knows the next waiting sequence and the room it needs.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        running: SequenceQueue,
        waiting: WaitingQueue,
        *,
        adapters: AdapterSlots,
        admission: Admission,
    ) -> None:
        self._config = config
        self._running = running
        self._waiting = waiting
        self._adapters = adapters
        self._admission = admission

    def victims_for_room(self, step: StepBuilder) -> Iterator[Sequence]:
        """Yields sequences of a lower class until the first waiting one has room.

        The caller must preempt each before asking for the next.
        """
        head = self._admission.first(step, with_long=True)
        if head is None:
            return
        while self._running and self._running.last.order[0] > head.order[0]:
            if len(self._running) < self._config.max_num_seqs and self._admission.will_fit(head):
                return
            yield self._running.last

    def victims_for_slot(self) -> list[Sequence]:
        """Returns the sequences of one adapter to evict for the first one that waits for a slot.

        All of them have a lower class than that sequence. If several adapters qualify, the one
        that is last in service order; if none does, nothing.
        """
        head = self._waiting.first_held
        if head is None or self._adapters.has_room:
            return []
        users: dict[int, list[Sequence]] = {}
        for seq in self._running:
            if seq.adapter_slot:
                users.setdefault(seq.adapter_slot, []).append(seq)
        lower = [each for each in users.values() if min(s.order for s in each)[0] > head.order[0]]
        return max(lower, key=lambda each: min(s.order for s in each), default=[])
