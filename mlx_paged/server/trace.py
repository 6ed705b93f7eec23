"""What is told of one HTTP request when it has ended: in the log, and in the metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Trace:
    """Filled by whoever knows; the middleware logs it.

    Attributes:
        request_id: From the client, or made up.
        sent: Whether the head of the response is on its way.
        status: Of the response; 0 until there is one.
        fields: Of the log line: model, prompt_tokens, cached_tokens, completion_tokens, ttft,
            finish_reason, ...
    """

    request_id: str
    method: str
    path: str
    client: str
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Since the request came."""
        return time.monotonic() - self.started

    def log_fields(self) -> dict[str, Any]:
        """Everything, for one line."""
        return {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "client": self.client,
            "status": self.status,
            "seconds": round(self.seconds, 4),
            **self.fields,
        }

    def note_body(self, body: Any) -> None:
        """Takes what the log says of a generation's body."""
        if body.request_id is not None:
            self.request_id = body.request_id
        self.fields["model"] = body.model
        self.fields["stream"] = bool(body.stream)
        for name in ("user", "safety_identifier", "metadata"):
            if getattr(body, name) is not None:
                self.fields[name] = getattr(body, name)
