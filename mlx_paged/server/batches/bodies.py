"""Request and response types of `/v1/files` and `/v1/batches`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12.

from mlx_paged.server.bodies import Body

# Lifetime of a file in seconds.
_LIFETIME = Field(ge=3600, le=2_592_000)
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]


class FileForm(Body):
    """`POST /v1/files`: a form, multipart/form-data."""

    file: str = Field(description="The file.", json_schema_extra={"format": "binary"})
    purpose: Literal["batch"] = Field(description="Only batch.")
    expires_after_anchor: Literal["created_at"] | None = Field(None, alias="expires_after[anchor]")
    expires_after_seconds: Annotated[int, _LIFETIME] | None = Field(
        None,
        alias="expires_after[seconds]",
        description="null: the file is kept until it is deleted.",
    )


class OutputExpiresAfter(Body):
    """The lifetime of a batch's output."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, _LIFETIME]


class BatchBody(Body):
    """`POST /v1/batches`."""

    input_file_id: str
    endpoint: str = Field(description="The path of all lines.")
    completion_window: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,3}h$")] = Field(
        description="Hours until unanswered lines expire, such as 24h."
    )
    metadata: Metadata | None = None
    output_expires_after: OutputExpiresAfter | None = Field(
        None, description="null: output is kept until it is deleted."
    )


class FileAnswer(TypedDict):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class FileList(TypedDict):
    """`GET /v1/files`."""

    object: Literal["list"]
    data: list[FileAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(TypedDict):
    """`DELETE /v1/files/{id}`."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchErrors(TypedDict):
    """Why a batch failed."""

    object: Literal["list"]
    data: list[dict[str, Any]]


class RequestCounts(TypedDict):
    """Numbers of lines: all, answered, and failed."""

    total: int
    completed: int
    failed: int


class BatchAnswer(TypedDict):
    """A batch."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: NotRequired[BatchErrors | None]
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "in_progress", "finalizing", "completed", "failed", "cancelling",
        "cancelled", "expired",
    ]  # fmt: skip
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(TypedDict):
    """`GET /v1/batches`."""

    object: Literal["list"]
    data: list[BatchAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool
