"""Typed errors of the package.

Every intentional error derives from `MlxPagedError`. Each class also derives from the built-in
exception that a caller would expect, such as `ValueError` for a bad argument, so code that does not
know this package still works. The values in a message are also attributes, so a server can build a
response without parsing text.
"""

from __future__ import annotations

from collections.abc import Sequence

_MAX_SHOWN = 200  # characters of a value in a message


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # a caller's broken repr, or an integer with too many digits for str()
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


class MlxPagedError(Exception):
    """Base of every intentional error of this package."""

    def __reduce__(self) -> tuple[object, ...]:
        # Its arguments are not those of `__init__`, which an exception's own method would call.
        return _restored, (type(self), self.args, vars(self))


def _restored(
    kind: type[MlxPagedError], args: tuple[object, ...], values: dict[str, object]
) -> MlxPagedError:
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(values)
    return error


class InvalidParameterError(MlxPagedError, ValueError):
    """A parameter has an invalid or unsupported value; it is rejected, never ignored.

    Attributes:
        field: Name of the parameter, as the caller wrote it.
        expected: Description of valid values.
        actual: The value given.
    """

    def __init__(self, field: str, expected: str, actual: object) -> None:
        super().__init__(f"{field} must be {expected} but got {_shown(actual)}")
        self.field = field
        self.expected = expected
        self.actual = actual


class InvalidMediaError(InvalidParameterError):
    """An image, video or audio clip of a prompt is unusable.

    Attributes:
        field: The part of the prompt that has it, as the caller wrote it.
        reason: The problem.
    """

    def __init__(self, field: str, reason: str) -> None:
        MlxPagedError.__init__(self, f"{field}: {reason}")
        self.field = field
        self.expected = "a readable picture, clip or sound"
        self.actual = None
        self.reason = reason


class RequestTooLargeError(MlxPagedError, ValueError):
    """A request does not fit even when it runs alone; it is rejected on arrival.

    Attributes:
        num_prompt_tokens: Number of prompt tokens.
        max_tokens: Number of tokens that the request wants to generate, at least 1.
        limit: Maximum tokens of prompt plus output.
        limited_by: Source of the limit: "max_model_len" or "kv_cache".
    """

    def __init__(
        self,
        request_id: str,
        *,
        num_prompt_tokens: int,
        max_tokens: int,
        limit: int,
        limited_by: str,
    ) -> None:
        cause = {
            "max_model_len": "the model's maximum length (max_model_len)",
            "kv_cache": "what the whole KV cache can hold",
        }.get(limited_by, limited_by)
        super().__init__(
            f"request {request_id!r} needs {num_prompt_tokens} prompt + {max_tokens} generated = "
            f"{num_prompt_tokens + max_tokens} tokens, but {cause} is {limit} tokens"
        )
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.limit = limit
        self.limited_by = limited_by


class DuplicateRequestError(MlxPagedError, ValueError):
    """A request has the same id as an unfinished one."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request id {request_id!r} is already in use by an unfinished request")
        self.request_id = request_id


class EngineOverloadedError(MlxPagedError, RuntimeError):
    """The waiting queue is full; try again later (HTTP 429)."""

    def __init__(self, num_waiting: int, max_num_waiting: int) -> None:
        super().__init__(
            f"{num_waiting} sequences are waiting and at most {max_num_waiting} may wait; "
            "try again later"
        )
        self.num_waiting = num_waiting
        self.max_num_waiting = max_num_waiting


class GrammarsBusyError(EngineOverloadedError):
    """Too many grammars past their time limit are still compiling; try again later (HTTP 429).

    Attributes:
        num_running: Number of these grammars.
    """

    def __init__(self, num_running: int) -> None:
        MlxPagedError.__init__(
            self,
            f"{num_running} grammars that take too long are still being compiled, and no more are "
            "compiled at the same time; try again later",
        )
        self.num_running = self.num_waiting = self.max_num_waiting = num_running


class MemoryPressureError(EngineOverloadedError):
    """The system is critically short of memory; running requests finish, and new ones are refused
    (HTTP 503).

    Attributes:
        retry_after: Seconds after which it may have memory again.
    """

    def __init__(self, retry_after: float) -> None:
        MlxPagedError.__init__(
            self,
            "the system is critically short of memory, so no new requests are taken; "
            "try again later",
        )
        self.retry_after = retry_after
        self.num_waiting = self.max_num_waiting = 0


class EngineDeadError(MlxPagedError, RuntimeError):
    """The engine has stopped and accepts no more requests."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine has stopped: {reason}")
        self.reason = reason


class ForkedProcessError(MlxPagedError, RuntimeError):
    """An engine or a paged mlx-lm model was used in a forked child, where MLX's threads do not
    exist.

    Attributes:
        pid: The process that used MLX before the fork.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(
            f"process {pid} used MLX and was forked: MLX's threads do not exist in the child, "
            "so nothing can be computed here. Start processes with multiprocessing's 'spawn' "
            "method, or use MLX (engines, models) only after the fork"
        )
        self.pid = pid


class OutOfMemoryError(MlxPagedError, MemoryError):
    """Memory for an array or a kernel could not be allocated.

    Attributes:
        num_bytes: Number of bytes requested.
    """

    def __init__(self, message: str, num_bytes: int) -> None:
        super().__init__(message)
        self.num_bytes = num_bytes


class StepError(MlxPagedError, RuntimeError):
    """A forward step failed for a request, or produced no token because of NaN logits or because
    no token is allowed."""

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(f"request {request_id!r} failed in a step: {reason}")
        self.request_id = request_id
        self.reason = reason


class ConstraintError(StepError, InvalidParameterError):
    """The request's constraint allows no further token in an output.

    Attributes:
        field: The parameter with the constraint.
    """

    def __init__(self, request_id: str, field: str, reason: str) -> None:
        MlxPagedError.__init__(self, f"request {request_id!r}: the answer ended: {reason}")
        self.request_id = request_id
        self.reason = reason
        self.field = field
        self.expected = "such that every answer can be followed to its end"
        self.actual = None


class RejectedMediaError(StepError, InvalidMediaError):
    """The model's tower rejected an image, video or audio clip while it was being encoded.

    Attributes:
        field: The part of the prompt that has it; "media" if unknown.
    """

    def __init__(self, request_id: str, field: str, reason: str) -> None:
        InvalidMediaError.__init__(self, field, reason)
        self.request_id = request_id


class ModelLoadError(MlxPagedError, RuntimeError):
    """A model could not be loaded: missing path, no weights, unreachable hub, broken config."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"cannot load model {model!r}: {reason}")
        self.model = model
        self.reason = reason


class AdapterError(MlxPagedError, ValueError):
    """An adapter cannot be used: missing or damaged files, or a kind that is not served.

    Attributes:
        path: Its directory.
        reason: The problem.
        is_missing: True if there is no such directory.
    """

    def __init__(self, path: str, reason: str, *, is_missing: bool = False) -> None:
        super().__init__(f"cannot load adapter {path!r}: {reason}")
        self.path = path
        self.reason = reason
        self.is_missing = is_missing


class UnsupportedModelError(MlxPagedError, ValueError):
    """The paged cache is not verified for the model's architecture."""

    def __init__(self, model_type: str, reason: str = "", supported: Sequence[str] = ()) -> None:
        message = f"model_type {model_type!r} is not supported"
        if reason:
            message += f": {reason}"
        if supported:
            message += f" (docs/models.md lists the {len(supported)} families that are)"
        super().__init__(message)
        self.model_type = model_type
        self.reason = reason
        self.supported = tuple(supported)


class BackendUnavailableError(MlxPagedError, RuntimeError):
    """An operation needs a backend that this build or this machine lacks."""

    def __init__(self, backend: str, reason: str) -> None:
        super().__init__(f"backend {backend!r} is not available: {reason}")
        self.backend = backend
        self.reason = reason


class InstallationError(MlxPagedError, ImportError):
    """MLX or the native extension cannot be loaded; the message says what to install."""

    @classmethod
    def of(cls, error: ImportError) -> InstallationError | None:
        """Returns an error for a failed import of MLX if ``libmlx.so`` is missing, else None.

        On Linux, ``libmlx.so`` is in a separate package.
        """
        if "libmlx" not in str(error):
            return None
        return cls(
            "MLX has no backend here; on Linux it is a separate package: "
            "pip install 'mlx-paged[cpu]', or 'mlx-paged[cuda13]' for an NVIDIA GPU "
            "(in a checkout '.[cpu]' or '.[cuda13]')"
        )


class IntegrityError(MlxPagedError, AssertionError):
    """`check_integrity()` found inconsistent state: a bug in this package."""
