"""Results of embedding and scoring. Names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_paged.engine.chat_template import render_chat
from mlx_paged.engine.outputs import RequestOutput
from mlx_paged.errors import InvalidParameterError, StepError


@dataclass(frozen=True)
class EmbeddingOutput:
    """The vector of a text.

    Attributes:
        embedding: Its numbers.
    """

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The number of dimensions."""
        return len(self.embedding)


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """A text and its vector.

    Attributes:
        request_id: The request.
        prompt: The text; None for token ids.
        prompt_token_ids: Its tokens.
        outputs: The vector.
        num_cached_tokens: Tokens that came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int
    finished: bool = True

    @classmethod
    def of(cls, output: RequestOutput) -> EmbeddingRequestOutput:
        """From a request of the engine that has ended.

        Raises:
            StepError: It ended without a vector.
        """
        [answer] = output.outputs
        if output.pooled is None:
            reason = f"it ended with {answer.finish_reason} before it was computed"
            raise answer.error or StepError(output.request_id, reason)
        return cls(
            output.request_id,
            output.prompt,
            output.prompt_token_ids,
            EmbeddingOutput(output.pooled.tolist()),
            output.num_cached_tokens,
        )


@dataclass(frozen=True)
class ClassificationOutput:
    """The classes of a text.

    Attributes:
        probs: Probabilities of the classes, in the order of `Engine.labels`.
    """

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.probs)


@dataclass(frozen=True)
class ClassificationRequestOutput:
    """A text and its classes. Other attributes are those of `EmbeddingRequestOutput`.

    Attributes:
        outputs: The classes.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: ClassificationOutput
    num_cached_tokens: int
    finished: bool = True


@dataclass(frozen=True)
class ScoringOutput:
    """The similarity of two texts.

    Attributes:
        score: Cosine of their vectors in [-1, 1], or a reranker's score of the pair in [0, 1].
    """

    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """Two texts and their score.

    Attributes:
        request_id: The requests for their vectors.
        prompt_token_ids: Tokens of the first text, then of the second.
        outputs: The score.
        num_cached_tokens: Sum over both texts, as in `EmbeddingRequestOutput`.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    num_cached_tokens: int
    finished: bool = True


def pairs_of(num_first: int, num_second: int, *, fields: tuple[str, str]) -> list[tuple[int, int]]:
    """Returns the index pairs to compare: one text with each other one, or each with its partner.

    Args:
        fields: Names of the two sides in errors.

    Raises:
        InvalidParameterError: A side is empty, or the numbers do not match.
    """
    for field, count in zip(fields, (num_first, num_second)):
        if count == 0:
            raise InvalidParameterError(field, "at least one text", [])
    if num_first not in (1, num_second):
        expected = f"one text, or one for each of the {num_second} of {fields[1]}"
        raise InvalidParameterError(fields[0], expected, f"{num_first} texts")
    return [(0 if num_first == 1 else i, i) for i in range(num_second)]


def joined(
    tokenizer: Any, first: str | list[int], second: str | list[int], template: str | None
) -> list[int]:
    """Returns the tokens of a pair of texts, for a reranker.

    Args:
        tokenizer: mlx-lm's wrapper.
        first, second: A query and a document, both as texts or as tokens.
        template: Jinja source for two messages with the roles "query" and "document", as in vLLM;
            None concatenates the texts.

    Raises:
        InvalidParameterError: Tokens instead of a text.
    """
    if isinstance(first, str) and isinstance(second, str):
        if template is None:
            return list(tokenizer.encode(first + second))
        messages = pair_messages(first, second)
        text = render_chat(tokenizer, messages, chat_template=template, add_generation_prompt=False)
        return list(tokenizer.encode(text, add_special_tokens=False))
    if isinstance(first, str) or isinstance(second, str) or template is not None:
        expected = "texts on both sides, or tokens on both sides and no template"
        raise InvalidParameterError("text_1 and text_2", expected, (first, second))
    return [*first, *second]


def pair_messages(query: str, document: str) -> list[dict[str, str]]:
    """Returns a pair as a template takes it."""
    return [{"role": "query", "content": query}, {"role": "document", "content": document}]


def cosine(first: Any, second: Any) -> float:
    """Cosine similarity in [-1, 1] of two vectors of length 1, or of zeros."""
    product = float(np.dot(np.asarray(first, np.float64), np.asarray(second, np.float64)))
    return max(-1.0, min(1.0, product))
