"""Messages that load adapters. They precede the first step that uses the adapter.

Every rank receives whole layers and keeps its part. Messages carry the weights rather than a path,
because another host may not have the files, and they may have changed since rank 0 read them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from mlx_paged.engine.ranks.messages import (
    ADAPTER,
    ADAPTER_LAYER,
    ADAPTER_SLOTS,
    Message,
    MessageError,
)
from mlx_paged.model.lora import AdapterLayers
from mlx_paged.model.lora_slots import LowRank


class Slots(NamedTuple):
    """The arguments of `PagedModel.enable_adapters`."""

    num_slots: int
    rank: int
    dtype: str


def slots_message(layers: AdapterLayers) -> Message:
    """Returns the message that makes another rank prepare the same slots as rank 0."""
    dtype = str(layers.dtype).rpartition(".")[2]
    return Message(ADAPTER_SLOTS, Slots(layers.num_slots, layers.rank, dtype)._asdict())


def slots_of(message: Message) -> Slots:
    """Parses the message of `slots_message`.

    Raises:
        MessageError: A field is missing, unknown or of the wrong type.
    """
    try:
        slots = Slots(**message.fields)
    except TypeError as error:
        raise MessageError(f"adapter slots need the fields {Slots._fields}: {error}") from error
    if any(type(value) is not kind for value, kind in zip(slots, (int, int, str))):
        raise MessageError(f"adapter slots must be (int, int, str) but are {slots}")
    return slots


def adapter_messages(slot: int, layers: Mapping[str, LowRank]) -> Iterator[Message]:
    """Yields the messages that load an adapter: one per layer, each small, and then the slot."""
    for path, change in layers.items():
        columns = {"a": array("f", change.a.tobytes()), "b": array("f", change.b.tobytes())}
        yield Message(ADAPTER_LAYER, {"path": path, "rank": len(change.a)}, columns)
    yield Message(ADAPTER, {"slot": slot})


class AdapterReader:
    """Collects the layers of an adapter from the messages of `adapter_messages`."""

    def __init__(self) -> None:
        self._layers: dict[str, LowRank] = {}

    def read(self, message: Message) -> None:
        """Adds the layer of a message.

        Raises:
            MessageError: The low-rank matrices are missing or do not have the stated rank.
        """
        rank = message.fields.get("rank")
        if not isinstance(rank, int) or rank < 1:
            raise MessageError(
                f"the rank of an adapter's layer must be a positive integer but is {rank!r}"
            )
        halves = []
        for name in ("a", "b"):
            column = message.columns.get(name)
            if column is None or column.typecode != "f" or not column or len(column) % rank:
                raise MessageError(f"an adapter's layer has no matrix {name!r} of rank {rank}")
            halves.append(np.frombuffer(column, dtype=np.float32).reshape(rank, -1))
        self._layers[str(message.fields.get("path"))] = LowRank(*halves)

    def take(self) -> Mapping[str, LowRank]:
        """Returns the layers by path, and starts over."""
        layers, self._layers = self._layers, {}
        return layers
