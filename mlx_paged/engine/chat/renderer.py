"""ChatRenderer: turns any legal conversation into a prompt that a model's chat template accepts.

The server, `LLM.chat`, the terminal chat and batch files all use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2

from mlx_paged.content import KINDS, MediaSource, check_kinds, sources_of
from mlx_paged.engine.chat.acceptance import TemplateForms, Tools, log_losses, with_tools
from mlx_paged.engine.chat.rewrites import Spelling
from mlx_paged.engine.chat.tools_as_text import Messages
from mlx_paged.engine.chat_template import is_program, render_chat
from mlx_paged.engine.media import rendered
from mlx_paged.errors import MlxPagedError
from mlx_paged.templates.variables import (
    ENABLE_THINKING,
    Switch,
    switches_of,
    variables_of,
    with_thinking_choice,
)

_USER, _SYSTEM = {"role": "user", "content": "ask"}, {"role": "system", "content": "rule"}
# Conversations that show a template's switches. Some templates need both messages.
_CONVERSATIONS = ([_USER], [_SYSTEM, _USER])
_MAX_TEMPLATES = 16  # whose forms are cached


class TemplateRefusal(MlxPagedError, ValueError):
    """A chat template rejects a conversation; the message is the template's own."""


class ChatText(NamedTuple):
    """A conversation rendered by a chat template.

    Attributes:
        text: The text with the model's placeholders. Placeholders that users wrote are marked
            (`multimodal.marks`).
        sources: The media of the placeholders, in order.
        spelling: The template's spelling; new ids of calls follow it.
    """

    text: str
    sources: list[MediaSource]
    spelling: Spelling


class ChatRenderer:
    """Renders conversations for one model. Any thread may call it.

    Args:
        tokenizer: mlx-lm's wrapper.
        media: `LoadedModel.media`; None if the model takes text only.
        media_reason: Why it takes text only, if the checkpoint is multimodal.
    """

    def __init__(
        self, tokenizer: Any, media: Any | None = None, media_reason: str | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.media, self._media_reason = media, media_reason
        self._templates: dict[tuple[str | None, str], _Template] = {}

    @classmethod
    def of(cls, engine: Any) -> ChatRenderer:
        """Returns the renderer for an engine's model."""
        return cls(engine.tokenizer, engine.media, engine.media_reason)

    @property
    def is_multimodal(self) -> bool:
        """True if the checkpoint has a processor."""
        return self.media is not None or self._media_reason is not None

    def check_media(self, messages: Sequence[Mapping[str, Any]]) -> list[MediaSource]:
        """Returns the media of a conversation.

        Raises:
            InvalidMediaError: The model does not take them.
        """
        sources = sources_of(messages)
        kinds = None if self.media is None else self.media.kinds
        check_kinds(sources, kinds, self._media_reason)
        return sources

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Tools = (),
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> ChatText:
        """Renders a conversation in the most faithful form that the template accepts.

        Args:
            messages: `role`, `content` as a text or a list of texts and `MediaSource`s, and any
                other fields. An answer may have `reasoning` and `tool_calls` (`function` with
                `name` and `arguments`, JSON text or an object). A result has the role "tool" and a
                `tool_call_id`.
            tools: OpenAI's format.
            chat_template: Jinja source that replaces the model's template.
            add_generation_prompt: End the text with the beginning of an answer.
            continue_final_message: End the text inside the last message.
            variables: Other variables of the template. `enable_thinking` is passed under the name
                that the template reads.

        Raises:
            TemplateRefusal: The template accepts no form of the conversation.
            InvalidMediaError: The model does not take its media.
        """
        sources, given = self.check_media(messages), dict(variables or {})
        if self.media is not None:
            counts = {kind: sum(source.kind == kind for source in sources) for kind in KINDS}
            messages, tools, given = self.media.literal((messages, tools, given), counts)
        known = self._known(chat_template, bool(tools))
        forms = known.forms
        given = with_thinking_choice(given, known.variables, known.switches)

        def render(form: Messages, offered: Tools) -> str:
            return render_chat(
                self.tokenizer,
                form,
                tools=offered or None,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **given,
            )

        options = repr((add_generation_prompt, sorted(given.items(), key=str)))
        try:
            if not sources:
                text = forms.rendered(messages, tools, render, options)
            else:
                text = rendered(
                    messages,
                    self.media,
                    lambda form: with_tools(form, tools, render),
                    lambda messages: forms.with_media(messages, tools, render, options),
                    log_losses,
                )
        except Exception as error:  # templates raise whatever they like
            raise TemplateRefusal(f"{error}") from error
        return ChatText(text, sources, forms.spelling)

    def tokens(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Returns the tokens of a conversation without media.

        Transformers' processors put the start token before a prompt that lacks it, with or without
        media; its tokenizers add nothing to a template's text. A checkpoint with a processor
        follows the first rule even if it is served for text only.

        Args:
            text: The template's text, see `ChatText`.
            add_special_tokens: The request's choice; None follows the rule.
        """
        if self.media is not None:
            found: list[int] = self.media.encode(text, add_special_tokens=add_special_tokens)
            return found
        adds = add_special_tokens
        if adds is None:
            start = getattr(self.tokenizer, "bos_token", None)
            adds = self.is_multimodal and not (start and text.startswith(start))
        return list(self.tokenizer.encode(text, add_special_tokens=adds))

    def spelling(self, chat_template: str | None = None) -> Spelling:
        """Returns a template's choice among equivalent spellings; None means the model's own."""
        return self._known(chat_template, has_tools=False).forms.spelling

    def _known(self, template: str | None, has_tools: bool) -> _Template:
        """Returns the facts about a template; None means the model's own."""
        source = self._source(template, has_tools)
        known = self._templates.get((template, source))
        if known is None:
            forms = TemplateForms(
                lambda form, tools: render_chat(
                    self.tokenizer, form, tools=tools, chat_template=template
                )
            )
            known = _Template(forms, *self._variables(source))
            if len(self._templates) >= _MAX_TEMPLATES:  # Requests may bring their own.
                self._templates.clear()
            self._templates[template, source] = known
        return known

    def _source(self, template: str | None, has_tools: bool) -> str:
        """Returns the source of a template; "" if the model's is a program."""
        if template is not None or is_program(self.tokenizer):
            return template or ""
        found = getattr(self.tokenizer, "chat_template", None) or ""
        if isinstance(found, Mapping):
            names = ("tool_use", "default") if has_tools else ("default", "tool_use")
            found = next((found[name] for name in names if name in found), "")
        return str(found)

    def _variables(self, source: str) -> tuple[frozenset[str], tuple[Switch, ...]]:
        """Returns the variables that a template reads, and its switches."""
        try:
            names = variables_of(source)
        except jinja2.TemplateError:
            return frozenset([ENABLE_THINKING]), ()

        def render(variables: Mapping[str, Any]) -> str:
            refusal: Exception | None = None
            for messages in _CONVERSATIONS:
                try:
                    return render_chat(self.tokenizer, messages, chat_template=source, **variables)
                except Exception as error:  # templates raise whatever they like
                    refusal = error
            assert refusal is not None
            raise refusal

        return names, switches_of(source, render)


class _Template(NamedTuple):
    """A chat template.

    Attributes:
        forms: The conversations that it accepts.
        variables: The variables that it reads.
        switches: Those variables that switch thinking.
    """

    forms: TemplateForms
    variables: frozenset[str]
    switches: tuple[Switch, ...]
