"""Prompts: random tokens, repeated prefixes, a file of conversations, or the embedded chats."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from mlx_paged.errors import InvalidParameterError, ModelLoadError

_T = TypeVar("_T")

DATA = "Data set"  # heading of these options in ``--help``

# vLLM's limits for a conversation file, so that both measure the same requests.
_MIN_TOKENS, _MAX_PROMPT_TOKENS, _MAX_TOKENS = 4, 1024, 2048


class Dataset(StrEnum):
    """The source of prompts."""

    RANDOM = "random"
    PREFIX_REPETITION = "prefix_repetition"
    SHAREGPT = "sharegpt"
    EMBEDDED = "embedded"


@dataclass(frozen=True)
class Prompt:
    """One request.

    Attributes:
        token_ids: Tokens of the prompt.
        max_tokens: Maximum tokens of the answer.
        text: Text of the tokens.
        messages: The prompt as a conversation; None if it is plain text.
    """

    token_ids: tuple[int, ...]
    max_tokens: int
    text: str
    messages: tuple[dict[str, str], ...] | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.token_ids)

    def as_text(self, tokenizer: Any) -> Prompt:
        """The prompt with the token ids that a server gets from its text, a few more or fewer."""
        return replace(self, token_ids=tuple(tokenizer.encode(self.text)))


def _option(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=DATA, **more)


def _number(help: str, default: str, *names: str, min: float = 1) -> Any:
    """A number whose default depends on the data set."""
    return _option(help, *names, min=min, show_default=default)


@dataclass(frozen=True)
class Workload:
    """A data set and its options; None means the data set's default.

    Used as an option group (see `with_options`).
    """

    dataset_name: Annotated[
        Dataset,
        _option(
            "random: random tokens; prefix_repetition: a few shared prefixes; sharegpt: a "
            "file of conversations; embedded: requests for the embedded model.",
        ),
    ] = Dataset.RANDOM
    num_prompts: Annotated[int, _option("Number of requests.", min=1)] = 64
    dataset_path: Annotated[Path | None, _option("sharegpt: file in ShareGPT's JSON format.")] = (
        None
    )
    input_len: Annotated[
        int | None,
        _number("random: tokens per prompt.", "128", "--input-len", "--random-input-len"),
    ] = None
    output_len: Annotated[
        int | None,
        _number(
            "Tokens per answer.", "64; sharegpt: the conversation's",
            "--output-len", "--random-output-len", "--sharegpt-output-len",
            "--prefix-repetition-output-len",
        ),
    ] = None  # fmt: skip
    prefix_len: Annotated[
        int | None,
        _number(
            "random: tokens of a prefix added to all prompts.", "0",
            "--prefix-len", "--random-prefix-len", min=0,
        ),
    ] = None  # fmt: skip
    range_ratio: Annotated[
        float | None,
        _number(
            "random: share by which lengths vary, uniformly.", "0",
            "--random-range-ratio", min=0.0,
        ),
    ] = None  # fmt: skip
    repeated_prefix_len: Annotated[
        int | None,
        _number("prefix_repetition: tokens per prefix.", "256", "--prefix-repetition-prefix-len"),
    ] = None
    repeated_suffix_len: Annotated[
        int | None,
        _number("prefix_repetition: tokens per suffix.", "256", "--prefix-repetition-suffix-len"),
    ] = None
    num_prefixes: Annotated[
        int | None,
        _number(
            "prefix_repetition: number of prefixes.", "10",
            "--prefix-repetition-num-prefixes",
        ),
    ] = None  # fmt: skip
    system_prompt: Annotated[
        bool | None,
        _option(
            "embedded: begin all chats with the same long system message.",
            "--system-prompt/--no-system-prompt", show_default="with it",
        ),
    ] = None  # fmt: skip

    def sample(self, tokenizer: Any, seed: int) -> list[Prompt]:
        """Returns the prompts, always the same for the same seed.

        Raises:
            InvalidParameterError: An option that this data set does not have, an unreadable file,
                or more prompts than the data set has.
        """
        for field in fields(self):
            owners = _OWNERS.get(field.name, tuple(Dataset))
            value = getattr(self, field.name)
            if value is not None and self.dataset_name not in owners:
                names = " or ".join(owner.value for owner in owners)
                expected = f"left out unless dataset_name is {names}"
                raise InvalidParameterError(_OPTIONS.get(field.name, field.name), expected, value)
        rng = random.Random(seed)
        return _SAMPLERS[self.dataset_name](self, tokenizer, rng)


# Data sets that have the option, and its name there; options that all of them have are not listed.
_OWNERS = {
    "dataset_path": (Dataset.SHAREGPT,),
    "input_len": (Dataset.RANDOM,),
    "prefix_len": (Dataset.RANDOM,),
    "range_ratio": (Dataset.RANDOM,),
    "repeated_prefix_len": (Dataset.PREFIX_REPETITION,),
    "repeated_suffix_len": (Dataset.PREFIX_REPETITION,),
    "num_prefixes": (Dataset.PREFIX_REPETITION,),
    "system_prompt": (Dataset.EMBEDDED,),
}
_OPTIONS = {
    "range_ratio": "random_range_ratio",
    "repeated_prefix_len": "prefix_repetition_prefix_len",
    "repeated_suffix_len": "prefix_repetition_suffix_len",
    "num_prefixes": "prefix_repetition_num_prefixes",
}


def random_prompts(
    tokenizer: Any,
    count: int,
    input_len: int,
    output_len: int,
    *,
    prefix_len: int = 0,
    range_ratio: float = 0.0,
    seed: int = 0,
) -> list[Prompt]:
    """Random tokens: `prefix_len` shared ones, then `input_len` more."""
    workload = Workload(Dataset.RANDOM, count, None, input_len, output_len, prefix_len, range_ratio)
    return workload.sample(tokenizer, seed)


def _random(workload: Workload, tokenizer: Any, rng: random.Random) -> list[Prompt]:
    ratio = _or(workload.range_ratio, 0.0)
    if not 0 <= ratio < 1:
        raise InvalidParameterError("random_range_ratio", "in [0, 1)", ratio)
    words = ordinary_tokens(tokenizer)

    def length(mean: int) -> int:
        return max(1, rng.randint(math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio))))

    shared = rng.choices(words, k=_or(workload.prefix_len, 0))
    prompts = []
    for _ in range(workload.num_prompts):
        own = rng.choices(words, k=length(_or(workload.input_len, 128)))
        prompts.append(_prompt(tokenizer, shared + own, length(_or(workload.output_len, 64))))
    return prompts


def _prefix_repetition(workload: Workload, tokenizer: Any, rng: random.Random) -> list[Prompt]:
    count = _or(workload.num_prefixes, 10)
    if count > workload.num_prompts:
        expected = f"at most num_prompts, which is {workload.num_prompts}"
        raise InvalidParameterError("prefix_repetition_num_prefixes", expected, count)
    words = ordinary_tokens(tokenizer)
    prefixes = [rng.choices(words, k=_or(workload.repeated_prefix_len, 256)) for _ in range(count)]
    suffix_len, output_len = _or(workload.repeated_suffix_len, 256), _or(workload.output_len, 64)
    prompts = [
        _prompt(tokenizer, prefixes[i % count] + rng.choices(words, k=suffix_len), output_len)
        for i in range(workload.num_prompts)
    ]
    rng.shuffle(prompts)
    return prompts


def _sharegpt(workload: Workload, tokenizer: Any, rng: random.Random) -> list[Prompt]:
    path = workload.dataset_path
    if path is None:
        raise InvalidParameterError("dataset_path", "a file of conversations", None)
    turns = _read_conversations(path)
    rng.shuffle(turns)
    prompts: list[Prompt] = []
    for question, answer in turns:
        if len(prompts) == workload.num_prompts:
            break
        token_ids = tuple(tokenizer.encode(question))
        max_tokens = _or(workload.output_len, len(tokenizer.encode(answer)))
        if (
            _MIN_TOKENS <= len(token_ids) <= _MAX_PROMPT_TOKENS
            and (workload.output_len is not None or max_tokens >= _MIN_TOKENS)
            and len(token_ids) + max_tokens <= _MAX_TOKENS
        ):
            messages = ({"role": "user", "content": question},)
            prompts.append(Prompt(token_ids, max_tokens, question, messages))
    _require(len(prompts), workload.num_prompts, f"conversations of {path} that are usable")
    return prompts


def _read_conversations(path: Path) -> list[tuple[str, str]]:
    """Returns the first two turns of each conversation; skips conversations with fewer."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        expected = f"a readable file ({error.strerror})"
        raise InvalidParameterError("dataset_path", expected, str(path)) from None
    except ValueError as error:
        raise InvalidParameterError("dataset_path", f"JSON ({error})", str(path)) from None
    shape = 'a JSON list of {"conversations": [{"value": TEXT}, ...]}'
    if not isinstance(entries, list):
        raise InvalidParameterError("dataset_path", shape, type(entries).__name__)
    found = []
    for number, entry in enumerate(entries):
        try:
            values = [turn["value"] for turn in entry["conversations"][:2]]
        except (KeyError, TypeError):
            values = [None]
        if not all(isinstance(value, str) for value in values):
            raise InvalidParameterError(
                "dataset_path", f"{shape} (entry {number} is not)", str(path)
            )
        if len(values) == 2:
            found.append((values[0], values[1]))
    return found


def _embedded(workload: Workload, tokenizer: Any, rng: random.Random) -> list[Prompt]:
    from mlx_paged.demo.prompts import CHATS, REQUESTS, SYSTEM_PROMPT

    questions = [*CHATS, *REQUESTS]
    _require(len(questions), workload.num_prompts, "embedded chats")
    system = [{"role": "system", "content": SYSTEM_PROMPT}]
    prompts = []
    for question in rng.sample(questions, workload.num_prompts):
        messages = system if _or(workload.system_prompt, True) else []
        messages = [*messages, {"role": "user", "content": question}]
        text, token_ids = _rendered(tokenizer, messages)
        prompts.append(Prompt(token_ids, _or(workload.output_len, 64), text, tuple(messages)))
    return prompts


def _rendered(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[str, tuple[int, ...]]:
    """Renders a conversation with the chat template; without one, joins its texts."""
    if not tokenizer.has_chat_template:
        text = "\n\n".join(message["content"] for message in messages)
        return text, tuple(tokenizer.encode(text))
    from mlx_paged.engine.chat_template import render_chat

    text = render_chat(tokenizer, messages)
    return text, tuple(tokenizer.encode(text, add_special_tokens=False))


_SAMPLERS = {
    Dataset.RANDOM: _random,
    Dataset.PREFIX_REPETITION: _prefix_repetition,
    Dataset.SHAREGPT: _sharegpt,
    Dataset.EMBEDDED: _embedded,
}


def tokenizer_of(model: str | None) -> Any:
    """Returns mlx-lm's tokenizer of a model directory, GGUF file or hub id; None means the embedded
    model.

    Raises:
        ModelLoadError: The tokenizer could not be loaded.
    """
    from huggingface_hub.errors import RepositoryNotFoundError
    from mlx_lm.utils import load_tokenizer

    from mlx_paged.demo import model_path
    from mlx_paged.gguf.reader import is_gguf
    from mlx_paged.model.gguf_loading import load_gguf_tokenizer

    if model is None:
        return load_tokenizer(model_path())
    if is_gguf(model):
        return load_gguf_tokenizer(model)
    try:
        return load_tokenizer(model)
    except (OSError, ValueError, RepositoryNotFoundError) as error:
        reason = f"no tokenizer ({type(error).__name__}: {str(error).strip().splitlines()[0]})"
        raise ModelLoadError(model, reason) from error


def ordinary_tokens(tokenizer: Any) -> list[int]:
    """Returns tokens to draw from: words with a leading space, if the vocabulary has them.

    Their texts encode back to nearly the same tokens.
    """
    vocabulary = tokenizer.get_vocab()
    words = sorted(i for t, i in vocabulary.items() if t[:1] in "Ġ▁" and t[1:].isalpha())
    if len(words) < 100:
        special = set(getattr(tokenizer, "all_special_ids", ()))
        words = sorted(set(vocabulary.values()) - special)
    return words


def _prompt(tokenizer: Any, token_ids: Sequence[int], max_tokens: int) -> Prompt:
    return Prompt(tuple(token_ids), max_tokens, tokenizer.decode(list(token_ids)))


def _require(there: int, wanted: int, what: str) -> None:
    if there < wanted:
        expected = f"at most {there}, the number of {what}"
        raise InvalidParameterError("num_prompts", expected, wanted)


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value
