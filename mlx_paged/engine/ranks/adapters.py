"""The messages about adapters, which come before the first step that uses them.

Every rank gets whole layers, and keeps its own part of them. The weights travel, not the path of
their files: another host may not have these files, and they may have changed by now.
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
from mlx_paged.model.lora import AdapterLayers, LowRank


class Slots(NamedTuple):
    """The arguments of `PagedModel.enable_adapters`."""

    num_slots: int
    rank: int
    dtype: str


def slots_message(layers: AdapterLayers) -> Message:
    """The message that prepares the slots of rank 0 on another rank."""
    dtype = str(layers.dtype).rpartition(".")[2]
    return Message(ADAPTER_SLOTS, Slots(layers.num_slots, layers.rank, dtype)._asdict())


def slots_of(message: Message) -> Slots:
    """Reads the message of `slots_message`.

    Raises:
        MessageError: Fields that are missing or of another kind.
    """
    try:
        slots = Slots(**message.fields)
    except TypeError as error:
        raise MessageError(f"slots without fields of theirs: {error}") from error
    if any(type(value) is not kind for value, kind in zip(slots, (int, int, str))):
        raise MessageError(f"slots must be two numbers and a dtype but are {slots}")
    return slots


def adapter_messages(slot: int, layers: Mapping[str, LowRank]) -> Iterator[Message]:
    """The messages that load an adapter: one for each layer, so that none is large, and a last
    one."""
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
            MessageError: It is not a layer of that rank.
        """
        rank = message.fields.get("rank")
        if not isinstance(rank, int) or rank < 1:
            raise MessageError(f"the rank of an adapter's layer must be a number but is {rank!r}")
        halves = []
        for name in ("a", "b"):
            column = message.columns.get(name)
            if column is None or column.typecode != "f" or not column or len(column) % rank:
                raise MessageError(f"a layer of rank {rank} has no such half {name!r}")
            halves.append(np.frombuffer(column, dtype=np.float32).reshape(rank, -1))
        self._layers[str(message.fields.get("path"))] = LowRank(*halves)

    def take(self) -> Mapping[str, LowRank]:
        """Returns the layers by path, and begins anew."""
        layers, self._layers = self._layers, {}
        return layers
