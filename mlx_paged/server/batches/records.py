"""BatchRecord: the state of a batch, as it is kept on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from mlx_paged.errors import InvalidParameterError

Status = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled",
    "expired",
]  # fmt: skip
#: Those in which nothing happens any more.
ENDED: tuple[Status, ...] = ("completed", "failed", "cancelled", "expired")


@dataclass(frozen=True)
class BatchRecord:
    """A batch. Times are seconds since 1970.

    Attributes:
        kind: The API that it belongs to.
        endpoint: The path that its lines name.
        input_file_id: A file of the API with its lines; None: its input is its own.
        output_file_id, error_file_id: Where its output goes; files of the API once it has ended,
            and None if they stayed empty.
        expires_at: When what is not answered yet is given up.
        output_expires_after: Seconds that its output is kept; None: until it is deleted.
        ending: How it ends, once nothing is answered any more; None before that.
        total: Lines, once they are counted.
        completed, failed: Lines that were answered and refused, once `ending` is set.
        errors: Why it failed, as OpenAI's API has them: code, line, message, param.
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
        """A record as it was stored.

        Raises:
            InvalidParameterError: it is none.
        """
        known = {each.name for each in fields(cls)}
        try:
            return cls(**{name: value for name, value in stored.items() if name in known})
        except TypeError as error:
            expected = f"a folder of records of batches ({error})"
            raise InvalidParameterError("files_dir", expected, stored.get("id")) from None

    def stored(self) -> dict[str, Any]:
        """The record as JSON has it."""
        return asdict(self)

    @property
    def has_ended(self) -> bool:
        """True once nothing happens any more."""
        return self.status in ENDED
