"""Bodies of requests and answers for embeddings, pooling, scores and reranking.

Names follow OpenAI (embeddings), vLLM (pooling, score), and Jina and Cohere (rerank).
"""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12.

from mlx_paged.server.bodies import (
    Body,
    Messages,
    RequestFields,
    TemplateFields,
    TokenIds,
)
from mlx_paged.server.responses import Usage

#: Maximum texts of one body, as in OpenAI's API.
MAX_TEXTS = 2048

_Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
_Text = str | _Texts


class PoolingRequest(RequestFields):
    """Fields of every body with texts to embed. null means the default everywhere."""

    model: str | None = Field(None, description="One of the served names; null: the first.")
    add_special_tokens: bool | None = Field(
        None, description="Add the tokenizer's special tokens; true by default, for messages false."
    )


class InputBody(PoolingRequest, TemplateFields):
    """Texts, or a conversation."""

    input: (
        str
        | TokenIds
        | Annotated[list[str], Field(max_length=MAX_TEXTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(max_length=MAX_TEXTS, fail_fast=True)]
        | None
    ) = Field(None, description="A text, token ids, or a list of either.")
    messages: Messages | None = Field(
        None,
        description="A conversation instead of input, rendered by the chat template. Text only.",
    )
    add_generation_prompt: bool | None = Field(
        None, description="Of messages, as the rest; false by default."
    )
    continue_final_message: bool | None = None


class ClassifyBody(InputBody):
    """`POST /classify`."""

    use_activation: bool | None = Field(
        None, description="false: the layer's outputs, in place of probabilities."
    )


class EmbeddingBody(InputBody):
    """`POST /v1/embeddings`."""

    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: of float32, the lowest byte first. float by default."
    )
    dimensions: Annotated[int, Field(ge=1, lt=1 << 31)] | None = Field(
        None, description="Return only the first numbers, this many, scaled to length 1."
    )
    normalize: bool | None = Field(
        None, description="Scale to length 1; null: the server's default."
    )
    use_activation: bool | None = Field(None, description="vLLM's newer name of normalize.")
    embed_dtype: Literal["float32"] | None = Field(None, description="Only float32.")
    endianness: Literal["native", "little"] | None = Field(None, description="Only little.")


class PoolingBody(EmbeddingBody):
    """`POST /pooling`: vLLM's name for embeddings."""

    task: Literal["embed"] | None = Field(None, description="Only embed.")


class ScoreBody(PoolingRequest):
    """`POST /score`: two sides, each under one of its names."""

    text_1: _Text | None = Field(None, description="A text, or as many as text_2 has.")
    text_2: _Text | None = Field(None, description="A text, or several.")
    queries: _Text | None = Field(None, description="Another name of text_1, as is data_1.")
    documents: _Text | None = Field(None, description="Another name of text_2, as are the next.")
    items: _Text | None = None
    data_1: _Text | None = None
    data_2: _Text | None = None


class RerankDocument(Body):
    """A document in Jina's and Cohere's form."""

    text: str


class RerankBody(PoolingRequest):
    """`POST /rerank`."""

    query: str
    documents: Annotated[
        list[str | RerankDocument], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)
    ]
    top_n: Annotated[int, Field(ge=0, lt=1 << 31)] | None = Field(
        None, description="Return only the best, this many; null and 0: all."
    )
    return_documents: bool | None = Field(
        None, description="Return the documents' texts; true by default."
    )
    max_tokens_per_doc: Annotated[int, Field(ge=1, lt=1 << 31)] | None = Field(
        None, description="Keep only the first tokens of a document, this many."
    )
    rank_fields: Annotated[list[str], Field(max_length=0)] | None = Field(
        None, description="Only []: documents have no field but text."
    )


# Answers.


class Embedding(TypedDict):
    """The vector of a text: a list of numbers, or base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class PoolingAnswerBase(TypedDict):
    """Fields that all answers begin with."""

    id: str
    created: int
    model: str
    usage: Usage


class EmbeddingAnswer(PoolingAnswerBase):
    """`POST /v1/embeddings`."""

    object: Literal["list"]
    data: list[Embedding]


class Pooled(TypedDict):
    """The result of one text."""

    object: Literal["pooling"]
    index: int
    data: list[float] | str


class PoolingAnswer(PoolingAnswerBase):
    """`POST /pooling`."""

    object: Literal["list"]
    data: list[Pooled]


class Score(TypedDict):
    """The similarity of two texts: a cosine in [-1, 1], or the model's score of the pair."""

    object: Literal["score"]
    index: int
    score: float


class Classified(TypedDict):
    """The classes of a text, and the likeliest one."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(PoolingAnswerBase):
    """`POST /classify`."""

    object: Literal["list"]
    data: list[Classified]


class ScoreAnswer(PoolingAnswerBase):
    """`POST /score`."""

    object: Literal["list"]
    data: list[Score]


class RankedDocument(TypedDict):
    """The text of a document."""

    text: str


class Ranked(TypedDict):
    """A document by its index in the body, with its similarity to the query."""

    index: int
    relevance_score: float
    document: NotRequired[RankedDocument]


class RerankAnswer(PoolingAnswerBase):
    """`POST /rerank`: the best first."""

    results: list[Ranked]
