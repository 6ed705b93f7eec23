"""ServedLM: lm_eval's view of a model behind a `Service`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.api_models import JsonChatStr
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from mlx_paged.evals.service import OnReply, Service

_MAX_GENERATED = 256  # tokens of an answer, if the task does not say; as lm_eval's models have it
_DEFAULT_CONTEXT = 2048


class _Scored(NamedTuple):
    """A token sequence. Tokens from `start` on are scored."""

    tokens: list[int]
    start: int


class ServedLM(LM):  # type: ignore[misc]  # lm_eval is untyped
    """Scores and generates through completions; chats go through the chat template.

    Args:
        on_reply: Called after each request.
    """

    def __init__(self, service: Service, on_reply: OnReply | None = None) -> None:
        super().__init__()
        self._service = service
        self._on_reply = on_reply
        self.max_length = service.max_model_len or _DEFAULT_CONTEXT

    @property
    def tokenizer_name(self) -> str:
        """A name for lm_eval's caches of requests."""
        return self._service.model

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Empty: the server applies its own."""
        return ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> JsonChatStr:
        return JsonChatStr(json.dumps(chat_history, ensure_ascii=False))

    # Probabilities.

    def loglikelihood(self, requests: list[Instance], **_: Any) -> list[tuple[float, bool]]:
        return self._score(self._joined([request.args for request in requests]))

    def loglikelihood_rolling(self, requests: list[Instance], **_: Any) -> list[float]:
        scored, owners = [], []
        texts = [{"prompt": request.args[0]} for request in requests]
        for owner, tokens in enumerate(self._tokens(texts)):
            # The first token follows nothing, and is not scored. A window has one token more than
            # `max_seq_len`, and one is generated.
            windows = get_rolling_token_windows(
                tokens[1:], next(iter(tokens), 0), max_seq_len=self.max_length - 2, context_len=1
            )
            for context, found in map(make_disjoint_window, windows):
                scored.append(_Scored([*context, *found], len(context)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, scores in zip(owners, self._score(scored)):
            totals[owner] += scores[0]
        return totals

    def _joined(self, pairs: Sequence[tuple[Any, str]]) -> list[_Scored]:
        """The tokens of contexts with their continuations.

        Text is tokenized as a whole, because tokens may reach over the place where it is joined,
        with spaces at the end of a context moved to its continuation. After a chat template, a
        continuation is tokenized alone.
        """
        contexts: list[dict[str, Any]] = []
        wholes: list[dict[str, Any]] = []
        for context, continuation in pairs:
            if isinstance(context, JsonChatStr):
                contexts.append({"messages": json.loads(context.prompt)})
                alone: dict[str, Any] = {"prompt": continuation, "add_special_tokens": False}
                wholes.append(alone)
            else:
                contexts.append({"prompt": context.rstrip() if context else ""})
                wholes.append({"prompt": context + continuation})
        scored = []
        found = self._tokens([*contexts, *wholes])
        for (context, _), before, whole in zip(pairs, found, found[len(pairs) :]):
            if isinstance(context, JsonChatStr):
                whole = [*before, *whole]
            # Without a context the first token follows nothing, and is not scored.
            scored.append(_Scored(whole, max(1, len(before))))
        return scored

    def _score(self, scored: Sequence[_Scored]) -> list[tuple[float, bool]]:
        """Sums of log-probabilities, and True where greedy decoding gives these tokens."""
        # The beginning of what is too long is left out. One more token is generated.
        prompts = [tokens[-(self.max_length - 1) :] for tokens, _ in scored]
        options = {"max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        bodies = [{"prompt": prompt, **options} for prompt in prompts]
        replies = self._service.ask("/v1/completions", bodies, self._on_reply)
        results = []
        for (tokens, start), prompt, reply in zip(scored, prompts, replies):
            report = reply["choices"][0]["logprobs"]
            begin = max(1, start - (len(tokens) - len(prompt)))
            logprobs = report["token_logprobs"][begin : len(prompt)]
            likeliest = report["top_logprobs"][begin : len(prompt)]
            is_greedy = all(p >= max(top.values()) for p, top in zip(logprobs, likeliest))
            results.append((float(sum(logprobs)), is_greedy))
        return results

    def _tokens(self, bodies: Sequence[dict[str, Any]]) -> list[list[int]]:
        replies = self._service.ask("/tokenize", bodies)
        return [reply["tokens"] for reply in replies]

    # Generation.

    def generate_until(self, requests: list[Instance], **_: Any) -> list[str]:
        texts: list[str | None] = [None] * len(requests)
        for is_chat, path in ((False, "/v1/completions"), (True, "/v1/chat/completions")):
            places = [i for i, r in enumerate(requests) if _is_chat(r) is is_chat]
            bodies = [_generation(*requests[i].args) for i in places]
            for i, reply in zip(places, self._service.ask(path, bodies, self._on_reply)):
                choice = reply["choices"][0]
                text = choice["message"]["content"] if is_chat else choice["text"]
                texts[i] = text or ""
        return [text or "" for text in texts]


def _is_chat(request: Instance) -> bool:
    return isinstance(request.args[0], JsonChatStr)


def _generation(context: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The body of a request for an answer, from lm_eval's options."""
    stop = options.get("until") or []
    stop = [stop] if isinstance(stop, str) else stop
    greedy = not options.get("do_sample", False)
    body = {
        "max_tokens": options.get("max_gen_toks", options.get("max_tokens", _MAX_GENERATED)),
        "stop": [text for text in stop if text],
        "temperature": 0 if greedy else options.get("temperature", 1.0),
    }
    body |= {name: options[name] for name in ("top_p", "top_k", "seed") if name in options}
    if isinstance(context, JsonChatStr):
        return {"messages": json.loads(context.prompt), **body}
    return {"prompt": context, **body}
