"""Logging: one line an event, as text or as JSON."""

from __future__ import annotations

import contextlib
import json
import logging
import logging.config
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml
from huggingface_hub.utils.tqdm import disable_progress_bars

from mlx_paged.errors import InvalidParameterError, MlxPagedError

logger = logging.getLogger(__name__)

LEVELS = ("debug", "info", "warning", "error", "critical")
FORMATS = ("text", "json")

# Attributes of every record; others come from `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {k: v for k, v in vars(record).items() if k not in _STANDARD and v is not None}


def _time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        line = {
            "time": _time(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Time, level, message, then extra fields as key=value."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line. Text from clients can neither break it nor imitate another line."""
        extra = " ".join(f"{k}={_value(v)}" for k, v in _extra(record).items())
        stamp = _time(record).strftime("%Y-%m-%d %H:%M:%S")
        line = f"{stamp} {record.levelname} {record.getMessage()} {extra}".rstrip()
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _value(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text and text else json.dumps(text)


def configure(level: str = "info", style: str = "text", file: Path | None = None) -> None:
    """Sets up logging for the process.

    Args:
        level: One of `LEVELS`.
        style: One of `FORMATS`.
        file: YAML or JSON in the form of `logging.config.dictConfig`; it decides everything.

    Raises:
        InvalidParameterError: The file cannot be read, or is not such a configuration.
    """
    if file is not None:
        try:
            logging.config.dictConfig(yaml.safe_load(file.read_text()))
        except (OSError, yaml.YAMLError, ValueError, TypeError, AttributeError) as error:
            raise InvalidParameterError(
                "log_config", f"a logging configuration in YAML or JSON ({error})", str(file)
            ) from error
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for name in ("httpx", "httpcore", "asyncio"):
        logging.getLogger(name).setLevel(max(logging.INFO, root.level))
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, root.level))
    _redirect_library_loggers()
    logging.captureWarnings(True)
    if style == "json":
        disable_progress_bars()  # of downloads
        sys.excepthook = _log_exception
        threading.excepthook = _log_thread_exception


def add_field(name: str, value: str) -> None:
    """Adds a field to every line of this process that has none of the name."""

    def add(record: logging.LogRecord) -> bool:
        vars(record).setdefault(name, value)
        return True

    for handler in logging.getLogger().handlers:
        handler.addFilter(add)


def _redirect_library_loggers() -> None:
    """Has libraries log as we do, that brought handlers of their own (transformers, the hub)."""
    for each in list(logging.root.manager.loggerDict.values()):
        if isinstance(each, logging.Logger):
            if any(isinstance(handler, logging.StreamHandler) for handler in each.handlers):
                each.handlers = []
            if not each.handlers:
                each.propagate = True


def _log_exception(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    logger.critical("the program failed", exc_info=(kind, error, traceback))


def _log_thread_exception(arguments: threading.ExceptHookArgs) -> None:
    name = "" if arguments.thread is None else arguments.thread.name
    error = arguments.exc_value or arguments.exc_type()
    logger.error(
        "the thread %s failed", name,
        exc_info=(arguments.exc_type, error, arguments.exc_traceback),
    )  # fmt: skip


@contextlib.contextmanager
def last_line(style: str) -> Iterator[None]:
    """Logs an error that ends the program as JSON, if lines are JSON.

    Raises:
        SystemExit: Replaces the error; its status is 1.
    """
    try:
        yield
    except Exception as error:
        if style != "json":
            raise
        expected = isinstance(error, MlxPagedError)
        logger.critical("%s", error, exc_info=None if expected else error)
        raise SystemExit(1) from None
