"""The tool formats' families as chat templates, to test derived formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_paged.templates.probe import Message, Refused, TemplateProbe
from support.tool_families import Family


class FamilyProbe(TemplateProbe):
    """Returns a family as a chat template: its renderer inside our own turns."""

    def __init__(self, family: Family) -> None:
        super().__init__("", family.tokens)
        self._family = family

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        text = ""
        for message in messages:
            content = message.get("content") or ""
            calls = [self._call(call) for call in message.get("tool_calls") or ()]
            if message["role"] == "assistant":
                if len(calls) > 1 and not self._family.has_parallel:
                    raise Refused("one call at a time")
                content = self._family.before(content) if content and calls else content
                content = content or ("" if calls else self._family.alone(""))
                if not calls:
                    content = self._family.alone(message.get("content") or "")
                content += self._family.render(calls) if calls else ""
            text += f"<|{message['role']}|>\n{content}<|end of turn|>\n"
        return text + ("<|assistant|>\n" if add_generation_prompt else "")

    def _call(self, call: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        function = call["function"]
        if isinstance(function["arguments"], str):
            raise Refused("arguments must be an object")
        return function["name"], function["arguments"]
