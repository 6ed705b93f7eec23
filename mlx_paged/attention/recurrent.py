"""Recurrent state, kept in numbered slots.

A recurrent layer (Mamba, gated delta, short convolutions, RWKV) has a state for each sequence, of
the same size at every length. Every recurrent cache of a model has ``num_slots`` slots; slot *i*
of all of them together is the state of one sequence after some number of tokens.

The contract with whoever hands out slots:

- In a step every sequence names the slot that it **reads** (its state before the step's tokens)
  and the slot that it **writes** (its state after them): `StateSlots`.
- **Slot 0 is the initial state**, all zeros. It is never handed out and never written; a sequence
  whose first token is in the step reads slot 0. Writing to -1 writes nothing.
- A slot that is read keeps what it holds unless it is also the one written. So
  - a *snapshot* costs no copy: leave the slot that was written where it is, and let the next step
    read it and write another;
  - a *fork* or a *prefix hit* reads the snapshot's slot, as often as wanted, and writes its own;
  - a step that *failed* can be run again as it was, because its states before are untouched, as
    long as every sequence reads one slot and writes another. With one step in flight while the next
    is launched, that takes slots that are not written by the next step either: three for a
    sequence, used in turn, or a new one for every step.
  `reads[i] == writes[i]` is allowed and saves the slots, for whoever never runs a step twice.
- In one step no slot is written twice, and none that one sequence writes is read by another.
- As with blocks, a slot is handed out again only after the last step that reads it has been
  evaluated.
- A state is known at the end of a sequence's rows in a step, and nowhere between: who wants the
  state after token *n* (a block boundary) lets a step end there.
- `copy_states` copies slots for whoever needs a copy after all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StateSlots:
    """Slots of a step's sequences, in the order of their rows."""

    reads: Sequence[int]  # [num_seqs]; 0: the initial state
    writes: Sequence[int]  # [num_seqs]; -1: nowhere
