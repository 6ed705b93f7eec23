"""ResponseStore: responses kept in memory for later requests, with LRU eviction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json


class Segment:
    """The part that one response adds to its conversation.

    Attributes:
        before: The segment that this one continues; None if it begins a conversation.
        input: New input items, as a JSON list.
        output: Output items, as a JSON list.
        item_ids: Ids of the output items.
        num_users: Number of stored responses and later segments that refer to it.
    """

    __slots__ = ("before", "input", "item_ids", "num_users", "output")

    def __init__(
        self, before: Segment | None, input: bytes, output: bytes, item_ids: tuple[str, ...]
    ) -> None:
        self.before = before
        self.input = input
        self.output = output
        self.item_ids = item_ids
        self.num_users = 0

    @property
    def size(self) -> int:
        """Bytes of its JSON."""
        return len(self.input) + len(self.output)

    def chain(self) -> list[Segment]:
        """Returns all segments of the conversation, oldest first."""
        found = [self]
        while (before := found[-1].before) is not None:
            found.append(before)
        return found[::-1]


@dataclass(frozen=True, slots=True)
class _Entry:
    head: bytes  # the response without its output, as JSON
    segment: Segment

    @property
    def size(self) -> int:
        return len(self.head)


class ResponseStore:
    """Stored responses by id. Not thread-safe.

    Responses of one conversation share its segments, which are kept and counted once. Evicting or
    deleting a response keeps the segments that others continue.

    Args:
        max_responses: Maximum responses; 0 stores none.
        max_bytes: Maximum bytes of all responses, as JSON. A larger response is not stored.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._by_item: dict[str, Segment] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def put(
        self, response: Mapping[str, Any], new_input: list[dict[str, Any]], before: Segment | None
    ) -> bool:
        """Stores a response that has ended.

        Args:
            response: The response, in the API's format.
            new_input: Items that its request added to the conversation.
            before: The conversation that it continued.

        Returns:
            True if there was room for it.
        """
        output = response["output"]
        segment = Segment(
            before, to_json(new_input), to_json(output), tuple(item["id"] for item in output)
        )
        head = {key: value for key, value in response.items() if key != "output"}
        entry = _Entry(to_json(head), segment)
        if not self.max_responses or entry.size + _sum_of_sizes(segment) > self.max_bytes:
            return False
        self._retain(segment)
        self._entries[response["id"]] = entry
        self.num_bytes += entry.size
        while len(self._entries) > self.max_responses or self.num_bytes > self.max_bytes:
            self._forget(next(iter(self._entries)))
        return True

    def get(self, response_id: str) -> dict[str, Any] | None:
        """Returns a response in the API's format, or None. Marks it as used."""
        entry = self._used(response_id)
        if entry is None:
            return None
        found: dict[str, Any] = from_json(entry.head)
        found["output"] = from_json(entry.segment.output)
        return found

    def status(self, response_id: str) -> str | None:
        """Returns the status of a response, or None."""
        entry = self._entries.get(response_id)
        return None if entry is None else from_json(entry.head).get("status")

    def fits(self, new_input: list[dict[str, Any]], before: Segment | None) -> bool:
        """Returns True if a conversation, without its next answer, fits into the store."""
        segment = Segment(before, to_json(new_input), b"", ())
        return _sum_of_sizes(segment) <= self.max_bytes

    def segment(self, response_id: str) -> Segment | None:
        """Returns the conversation up to and including a response, or None. Marks it as used."""
        entry = self._used(response_id)
        return None if entry is None else entry.segment

    def item(self, item_id: str) -> dict[str, Any] | None:
        """Returns an output item of a stored response, or None."""
        segment = self._by_item.get(item_id)
        if segment is None:
            return None
        items: Iterator[dict[str, Any]] = iter(from_json(segment.output))
        return next(item for item in items if item["id"] == item_id)

    def delete(self, response_id: str) -> bool:
        """Deletes a response; returns True if it was there."""
        if response_id not in self._entries:
            return False
        self._forget(response_id)
        return True

    def _used(self, response_id: str) -> _Entry | None:
        entry = self._entries.get(response_id)
        if entry is not None:
            self._entries.move_to_end(response_id)
        return entry

    def _forget(self, response_id: str) -> None:
        entry = self._entries.pop(response_id)
        self.num_bytes -= entry.size
        self._release(entry.segment)

    def _retain(self, segment: Segment) -> None:
        """Adds a user to a segment; its first user also retains the segment before it."""
        current: Segment | None = segment
        while current is not None:
            current.num_users += 1
            if current.num_users > 1:
                return
            self.num_bytes += current.size
            self._by_item |= dict.fromkeys(current.item_ids, current)
            current = current.before

    def _release(self, segment: Segment) -> None:
        current: Segment | None = segment
        while current is not None:
            current.num_users -= 1
            if current.num_users:
                return
            self.num_bytes -= current.size
            for item_id in current.item_ids:
                self._by_item.pop(item_id, None)
            current = current.before


class LatestResponse:
    """The latest response of one connection, stored or not.

    Args:
        max_bytes: Maximum bytes of its conversation, as JSON. A longer one is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._id: str | None = None
        self._segment: Segment | None = None

    def put(
        self, response: Mapping[str, Any], new_input: list[dict[str, Any]], before: Segment | None
    ) -> None:
        """Replaces the previous response; see `ResponseStore.put`."""
        output = response["output"]
        segment = Segment(
            before, to_json(new_input), to_json(output), tuple(item["id"] for item in output)
        )
        self._id = self._segment = None
        if _sum_of_sizes(segment) <= self._max_bytes:
            self._id, self._segment = response["id"], segment

    def segment(self, response_id: str) -> Segment | None:
        """Returns the conversation up to and including a response; None if it is not the latest."""
        return self._segment if response_id == self._id else None

    def item(self, item_id: str) -> dict[str, Any] | None:
        """Returns an output item of the response, or None."""
        if self._segment is None or item_id not in self._segment.item_ids:
            return None
        items: Iterator[dict[str, Any]] = iter(from_json(self._segment.output))
        return next(item for item in items if item["id"] == item_id)

    def forget(self, response_id: str | None) -> None:
        """Forgets the response if it has this id."""
        if response_id is not None and response_id == self._id:
            self._id = self._segment = None


def _sum_of_sizes(segment: Segment) -> int:
    return sum(each.size for each in segment.chain())
