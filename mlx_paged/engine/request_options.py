"""Checks the options of requests where they enter, so that no wrong value reaches a step.

`SamplingParams` checks its own fields, and `core.Request` those that the scheduler works with.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from mlx_paged.content import MediaSource
from mlx_paged.core.kv.tree import TOKEN_TYPE
from mlx_paged.engine.checks import is_text
from mlx_paged.engine.lora.request import LoRARequest, checked_request
from mlx_paged.engine.media import TextWithMedia, data_sources
from mlx_paged.engine.pooling.params import PoolingParams
from mlx_paged.engine.sampling_params import SamplingParams
from mlx_paged.errors import InvalidMediaError, InvalidParameterError
from mlx_paged.extension import ext

_PROMPT = "a text, or token ids as a list or an array of integers"
_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "multi_modal_data")
_BYTES = (str, bytes, bytearray, memoryview)


def token_ids_of(field: str, given: Any, vocab_size: int) -> tuple[list[int], array[int]]:
    """Returns token ids as a new list of plain integers, and in the array type of `core.Request`.

    One-dimensional arrays of NumPy and MLX are accepted, too.

    Raises:
        InvalidParameterError: Anything but integers in [0, vocab_size).
    """
    ids = _as_list(field, given)
    # 4 bytes each, in one pass; None unless all are plain integers in range.
    packed = ext.token_bytes(ids, vocab_size)
    if packed is None:
        wrong = [i for i in ids if not isinstance(i, Integral) or isinstance(i, bool)]
        ids = ids if wrong else [int(i) for i in ids]
        wrong = wrong or [i for i in ids if not 0 <= i < vocab_size]
        if wrong:
            raise InvalidParameterError(field, f"integers in [0, {vocab_size})", wrong[0])
        packed = ext.token_bytes(ids, vocab_size)
        assert packed is not None
    tokens = array(TOKEN_TYPE)
    tokens.frombytes(packed)
    return ids, tokens


def prompt_of(field: str, given: Any) -> str | list[Any]:
    """Returns a prompt as a text or as a list, whose elements `token_ids_of` checks.

    Raises:
        InvalidParameterError: Anything else, or a text with a lone surrogate.
    """
    if not isinstance(given, str):
        return _as_list(field, given)
    if not is_text(given):
        raise InvalidParameterError(field, "a text of Unicode characters", given)
    return given


def prompts_of(given: Any) -> list[str | list[Any]]:
    """Returns the prompts of `LLM.embed`: one, or a sequence of them (or rows of an array).

    Raises:
        InvalidParameterError: See `prompt_of`; the error gives the index of the prompt.
    """
    prompts: list[str | list[Any]] = []
    for i, prompt in enumerate(media_prompts_of(given)):
        if isinstance(prompt, TextWithMedia):
            raise InvalidMediaError(prompt.sources[0].part, f"prompts[{i}] must be text here")
        prompts.append(prompt)
    return prompts


def media_prompts_of(given: Any) -> list[str | list[Any] | TextWithMedia]:
    """Returns the prompts of `LLM.generate`: one, or a sequence of them (or rows of an array).

    Raises:
        InvalidParameterError: See `media_prompt_of`; the error gives the index of the prompt.
    """
    if isinstance(given, str | Mapping | TextWithMedia):
        return [media_prompt_of("prompts", given)]
    dimensions = getattr(given, "ndim", None)
    if dimensions == 2:
        return [prompt_of(f"prompts[{i}]", row) for i, row in enumerate(given)]
    prompts = _as_list("prompts", given)
    if dimensions == 1 or (prompts and isinstance(prompts[0], Integral)):
        return [prompts]
    # Lists are not copied here: `token_ids_of` does that, and long prompts take a while.
    return [
        prompt if type(prompt) is list else media_prompt_of(f"prompts[{i}]", prompt)
        for i, prompt in enumerate(prompts)
    ]


def media_prompt_of(field: str, given: Any) -> str | list[Any] | TextWithMedia:
    """Returns a prompt as `prompt_of` takes it, or vLLM's mapping with `prompt` or
    `prompt_token_ids`, and `multi_modal_data`.

    Raises:
        InvalidParameterError: Neither of them.
    """
    if isinstance(given, TextWithMedia):
        return given
    if not isinstance(given, Mapping):
        return prompt_of(field, given)
    name = "prompt_token_ids" if given.get("prompt_token_ids") is not None else "prompt"
    inner, sources = _split(given, field)
    prompt = prompt_of(f"{field}.{name}", inner)
    return TextWithMedia.of(str(inner), sources) if sources else prompt


def _split(given: Mapping[str, Any], field: str) -> tuple[Any, list[MediaSource]]:
    """vLLM's form of a prompt: its text or its token ids, and its media.

    Raises:
        InvalidParameterError: An entry that is none, both of them, or tokens with media.
    """
    for name in given:
        if name not in _PROMPT_FIELDS:
            raise InvalidParameterError(field, f"of {', '.join(_PROMPT_FIELDS)}", name)
    text, ids = given.get("prompt"), given.get("prompt_token_ids")
    if (text is None) == (ids is None):
        expected = "a mapping with either prompt or prompt_token_ids"
        raise InvalidParameterError(field, expected, sorted(given))
    sources: list[MediaSource] = []
    if given.get("multi_modal_data") is not None:
        sources = data_sources(given["multi_modal_data"], f"{field}.multi_modal_data")
    if sources and not isinstance(text, str):
        expected = "a text where there is multi_modal_data"
        raise InvalidParameterError(f"{field}.prompt", expected, text if ids is None else ids)
    return (text if ids is None else ids), sources


def params_of(given: Any) -> SamplingParams:
    """Returns the parameters of a request; None stands for the default.

    Raises:
        InvalidParameterError: Something else.
    """
    return SamplingParams() if given is None else _require_params("params", given)


def params_for_runner(given: Any, runner: str) -> SamplingParams | PoolingParams:
    """Returns the parameters of a request; None stands for the default of the engine's runner.

    Raises:
        InvalidParameterError: Something else.
    """
    if given is None:
        return PoolingParams() if runner == "pooling" else SamplingParams()
    if not isinstance(given, SamplingParams | PoolingParams):
        raise InvalidParameterError("params", "SamplingParams or PoolingParams", given)
    return given


def pooling_params_of(given: Any, field: str = "params") -> PoolingParams:
    """Returns the pooling parameters of a request; None stands for the default.

    Raises:
        InvalidParameterError: Something else.
    """
    if given is not None and not isinstance(given, PoolingParams):
        raise InvalidParameterError(field, "PoolingParams", given)
    return given or PoolingParams()


def params_for(given: Any, num_prompts: int) -> list[SamplingParams]:
    """Returns the parameters of each prompt, from one for all or a sequence of one for each.

    Raises:
        InvalidParameterError: Something else, or a sequence of another length.
    """
    if not isinstance(given, Sequence) or isinstance(given, _BYTES):
        return [params_of(given)] * num_prompts
    if len(given) != num_prompts:
        raise InvalidParameterError(
            "params", f"one for all or one for each of {num_prompts} prompts", len(given)
        )
    return [_require_params(f"params[{i}]", params) for i, params in enumerate(given)]


def lora_requests_for(given: Any, num_prompts: int) -> list[LoRARequest | None]:
    """Returns the adapter of each prompt, from one for all or a sequence of one for each.

    Raises:
        InvalidParameterError: Something else, or a sequence of another length.
    """
    if not isinstance(given, Sequence) or isinstance(given, _BYTES):
        return [checked_request(given)] * num_prompts
    if len(given) != num_prompts:
        expected = f"one for all or one for each of {num_prompts} prompts"
        raise InvalidParameterError("lora_request", expected, len(given))
    return [checked_request(each) for each in given]


def conversations_of(given: Any) -> list[list[Mapping[str, Any]]]:
    """Returns the conversations of `LLM.chat`: one, or a sequence of them.

    Raises:
        InvalidParameterError: Anything but messages.
    """
    chats = given if isinstance(given, Sequence) and not isinstance(given, _BYTES) else None
    if chats and isinstance(chats[0], Mapping):
        chats = [chats]
    for chat in () if chats is None else chats:
        if not isinstance(chat, Sequence) or not all(isinstance(m, Mapping) for m in chat):
            chats = None
            break
    if chats is None:
        expected = "messages with role and content, or a sequence of such conversations"
        raise InvalidParameterError("messages", expected, given)
    return [list(chat) for chat in chats]


def check_callables(token_mask: object, sink: object, prompt: object) -> None:
    """Checks options of `Intake.check` that are otherwise unused until later.

    Raises:
        InvalidParameterError: An option of the wrong kind.
    """
    if token_mask is not None and not callable(token_mask):
        raise InvalidParameterError("token_mask", "None or a function", token_mask)
    if sink is not None and not callable(getattr(sink, "put", None)):
        raise InvalidParameterError("sink", "None or an object with a method put", sink)
    if prompt is not None and not isinstance(prompt, str):
        raise InvalidParameterError("prompt", "None or a text", prompt)


def _require_params(field: str, given: Any) -> SamplingParams:
    if not isinstance(given, SamplingParams):
        raise InvalidParameterError(field, "SamplingParams", given)
    return given


def _as_list(field: str, given: Any) -> list[Any]:
    """Returns the elements of a sequence; refuses anything that is not a proper sequence."""
    if isinstance(given, Sequence) and not isinstance(given, _BYTES):
        return list(given)
    if getattr(given, "ndim", None) == 1:
        try:
            array = np.asarray(given)
        except Exception:  # of a dtype that NumPy lacks, or on another device
            array = np.empty(0)
        if array.dtype.kind in "iu":
            return array.tolist()  # type: ignore[no-any-return]
    raise InvalidParameterError(field, _PROMPT, given)
