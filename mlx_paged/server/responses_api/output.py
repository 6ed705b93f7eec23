"""Output: builds the items of a response and OpenAI's events about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mlx_paged.parsing import events
from mlx_paged.parsing.definitions import Tool
from mlx_paged.server.responses import ContentLogprob
from mlx_paged.server.responses_api.answers import (
    CustomCallItem,
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputText,
    ReasoningItem,
)
from mlx_paged.server.responses_api.items import encrypted, new_id

#: The body of an event without its sequence number.
EventBody = dict[str, Any]


class Output:
    """The items of a response. Only the last one can be open.

    Args:
        tools: Tools of the request, which determine names and namespaces of calls.
        summarizes: Put reasoning into `summary` instead of `content`.
        encrypts: Add `encrypted_content` to reasoning.

    Attributes:
        items: Finished items, in the API's format.
    """

    def __init__(self, tools: Sequence[Tool], *, summarizes: bool, encrypts: bool) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._summarizes = summarizes
        self._encrypts = encrypts
        self._open: _Message | _Reasoning | _Call | None = None
        self.items: list[OutputItem] = []

    @property
    def has_answer(self) -> bool:
        """True if there is an item besides reasoning."""
        return any(item["type"] != "reasoning" for item in self.items)

    def take(self, event: events.Event, logprobs: list[ContentLogprob]) -> Iterator[EventBody]:
        """Adds the next event of the answer; yields the events about it.

        Args:
            logprobs: Log-probabilities of its tokens; used for text only.
        """
        if isinstance(event, events.ContentText):
            yield from self.text(event.text, logprobs)
        elif isinstance(event, events.ReasoningText):
            if not isinstance(self._open, _Reasoning):
                yield from self.close()
                self._open = _Reasoning(len(self.items), self._summarizes, self._encrypts)
                yield from self._open.begin()
            yield from self._open.more(event.text)
        elif isinstance(event, events.CallBegin):
            yield from self.close()
            assert event.id is not None
            tool = self._tools.get(event.name) or Tool(event.name)
            of_kind = _CustomCall if tool.is_custom else _Call
            self._open = of_kind(len(self.items), event.id, tool)
            yield from self._open.begin()
        elif isinstance(event, events.CallArguments):
            assert isinstance(self._open, _Call)
            yield from self._open.more(event.text)
        else:
            assert isinstance(event, events.CallEnd)
            yield from self.close("completed" if event.is_complete else "incomplete")

    def text(self, text: str, logprobs: list[ContentLogprob]) -> Iterator[EventBody]:
        """Adds text to the open message, or to a new one."""
        if not isinstance(self._open, _Message):
            yield from self.close()
            self._open = _Message(len(self.items))
            yield from self._open.begin()
        if text:
            yield from self._open.more(text, logprobs)

    def close(self, status: ItemStatus = "completed") -> Iterator[EventBody]:
        """Ends the open item, if there is one."""
        if self._open is None:
            return
        item, self._open = self._open, None
        yield from item.end(status)
        self.items.append(item.done(status))


class _Item:
    """An open item.

    Args:
        index: Its index in the output.
    """

    kind: str

    def __init__(self, index: int) -> None:
        self.index = index
        self.id = new_id(self.kind)
        self.pieces: list[str] = []

    def about(self, type: str, **fields: Any) -> EventBody:
        """Returns an event about a part of the item."""
        return {"type": type, "item_id": self.id, "output_index": self.index, **fields}

    def added(self, item: OutputItem) -> EventBody:
        return {"type": "response.output_item.added", "output_index": self.index, "item": item}

    def ended(self, item: OutputItem) -> EventBody:
        return {"type": "response.output_item.done", "output_index": self.index, "item": item}


class _Message(_Item):
    """A message."""

    kind = "msg"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._logprobs: list[ContentLogprob] = []

    def begin(self) -> Iterator[EventBody]:
        yield self.added(
            {"id": self.id, "type": "message", "status": "in_progress", "role": "assistant",
             "content": []}
        )  # fmt: skip
        yield self.about("response.content_part.added", content_index=0, part=_output_text("", []))

    def more(self, text: str, logprobs: list[ContentLogprob]) -> Iterator[EventBody]:
        self.pieces.append(text)
        self._logprobs += logprobs
        yield self.about(
            "response.output_text.delta", content_index=0, delta=text, logprobs=logprobs
        )

    def end(self, status: ItemStatus) -> Iterator[EventBody]:
        item = self.done(status)
        [part] = item["content"]
        yield self.about(
            "response.output_text.done", content_index=0, text=part["text"],
            logprobs=self._logprobs,
        )  # fmt: skip
        yield self.about("response.content_part.done", content_index=0, part=part)
        yield self.ended(item)

    def done(self, status: ItemStatus) -> Any:
        part = _output_text("".join(self.pieces), self._logprobs)
        return {
            "id": self.id, "type": "message", "status": status, "role": "assistant",
            "content": [part],
        }  # fmt: skip


def _output_text(text: str, logprobs: list[ContentLogprob]) -> OutputText:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class _Reasoning(_Item):
    """Reasoning, shown as its text or as a summary that contains all of it."""

    kind = "rs"

    def __init__(self, index: int, summarizes: bool, encrypts: bool) -> None:
        super().__init__(index)
        self._summarizes = summarizes
        self._encrypts = encrypts
        # Names of the events in the two forms.
        if summarizes:
            self._part = "response.reasoning_summary_part"
            self._text = "response.reasoning_summary_text"
            self._index = {"summary_index": 0}
            self._kind = "summary_text"
        else:
            self._part = "response.content_part"
            self._text = "response.reasoning_text"
            self._index = {"content_index": 0}
            self._kind = "reasoning_text"

    def begin(self) -> Iterator[EventBody]:
        yield self.added({"id": self.id, "type": "reasoning", "summary": []})
        part = {"type": self._kind, "text": ""}
        yield self.about(f"{self._part}.added", **self._index, part=part)

    def more(self, text: str) -> Iterator[EventBody]:
        self.pieces.append(text)
        yield self.about(f"{self._text}.delta", **self._index, delta=text)

    def end(self, status: ItemStatus) -> Iterator[EventBody]:
        text = "".join(self.pieces)
        yield self.about(f"{self._text}.done", **self._index, text=text)
        part = {"type": self._kind, "text": text}
        yield self.about(f"{self._part}.done", **self._index, part=part)
        yield self.ended(self.done(status))

    def done(self, status: ItemStatus) -> ReasoningItem:
        text = "".join(self.pieces)
        item: ReasoningItem = {
            "id": self.id, "type": "reasoning", "summary": [], "status": status,
        }  # fmt: skip
        if self._summarizes:
            item["summary"] = [{"type": "summary_text", "text": text}]
        else:
            item["content"] = [{"type": "reasoning_text", "text": text}]
        if self._encrypts:
            item["encrypted_content"] = encrypted(text)
        return item


class _Call(_Item):
    """A call of a function."""

    kind = "fc"

    def __init__(self, index: int, call_id: str, tool: Tool) -> None:
        super().__init__(index)
        self._call_id = call_id
        self._tool = tool

    def begin(self) -> Iterator[EventBody]:
        yield self.added(self.done("in_progress"))

    def more(self, text: str) -> Iterator[EventBody]:
        self.pieces.append(text)
        yield self.about("response.function_call_arguments.delta", delta=text)

    def end(self, status: ItemStatus) -> Iterator[EventBody]:
        yield self.about(
            "response.function_call_arguments.done",
            name=self._tool.local_name,
            arguments="".join(self.pieces),
        )
        yield self.ended(self.done(status))

    def done(self, status: ItemStatus) -> FunctionCallItem | CustomCallItem:
        item: FunctionCallItem = {
            "id": self.id, "type": "function_call", "status": status, "call_id": self._call_id,
            "name": self._tool.local_name, "arguments": "".join(self.pieces),
        }  # fmt: skip
        if self._tool.namespace is not None:
            item["namespace"] = self._tool.namespace
        return item


class _CustomCall(_Call):
    """A call of a custom tool."""

    kind = "ctc"

    def more(self, text: str) -> Iterator[EventBody]:
        self.pieces.append(text)
        yield self.about("response.custom_tool_call_input.delta", delta=text)

    def end(self, status: ItemStatus) -> Iterator[EventBody]:
        text = "".join(self.pieces)
        yield self.about("response.custom_tool_call_input.done", input=text)
        yield self.ended(self.done(status))

    def done(self, status: ItemStatus) -> CustomCallItem:
        item: CustomCallItem = {
            "id": self.id, "type": "custom_tool_call", "status": status,
            "call_id": self._call_id, "name": self._tool.local_name,
            "input": "".join(self.pieces),
        }  # fmt: skip
        if self._tool.namespace is not None:
            item["namespace"] = self._tool.namespace
        return item
