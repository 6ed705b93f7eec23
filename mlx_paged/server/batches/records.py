"""BatchRecord: the state of a batch, as stored on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from mlx_paged.errors import InvalidParameterError

Status = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled",
    "expired",
]  # fmt: skip
#: Final statuses.
ENDED: tuple[Status, ...] = ("completed", "failed", "cancelled", "expired")


@dataclass(frozen=True)
class BatchRecord:
    """A batch. Times are Unix times in seconds.

    Attributes:
        kind: The API that created the batch.
        endpoint: The path of all its lines.
        input_file_id: The input file; None if the input is not a file of the API.
        output_file_id, error_file_id: Output files, which are files of the API once the batch has
            ended; None for an empty one.
        expires_at: When unanswered lines are abandoned.
        output_expires_after: Lifetime of the output in seconds; None: until it is deleted.
        ending: The final status, set once no more lines will be answered; None before.
        total: Number of lines, once they were counted.
        completed, failed: Numbers of answered and failed lines, once `ending` is set.
        errors: Why the batch failed, in OpenAI's format: code, line, message, param.
    """

    id: str
    kind: Literal["openai", "anthropic"]
    endpoint: str
    created_at: int
    expires_at: int
    completion_window: str
    input_file_id: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    output_expires_after: int | None = None
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    ending: Status | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> BatchRecord:
        """Converts a stored record; ignores unknown fields.

        Raises:
            InvalidParameterError: A field is missing.
        """
        known = {each.name for each in fields(cls)}
        try:
            return cls(**{name: value for name, value in stored.items() if name in known})
        except TypeError as error:
            expected = f"a folder of records of batches ({error})"
            raise InvalidParameterError("files_dir", expected, stored.get("id")) from None

    def stored(self) -> dict[str, Any]:
        """Returns the record in the form in which it is stored, as JSON."""
        return asdict(self)

    @property
    def has_ended(self) -> bool:
        """True if the status is final."""
        return self.status in ENDED
