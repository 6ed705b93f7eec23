"""Limits on requests and tokens per minute for each key, and the file with keys.

An allowance refills evenly, like OpenAI's: with 60 requests a minute, a new one is allowed each
second, and up to 60 at once after an idle minute. Tokens are counted as they are used: a prompt's
when its request begins, an answer's as they arrive. So a request may use more than the rest, and
the next ones wait until the allowance is positive again.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_paged.errors import InvalidParameterError
from mlx_paged.server.config import ServerConfig
from mlx_paged.server.errors import ApiError
from mlx_paged.server.metrics import Metrics

#: Headers of limited answers, for the pages of other origins.
HEADERS = tuple(
    f"x-ratelimit-{what}-{unit}"
    for what in ("limit", "remaining", "reset")
    for unit in ("requests", "tokens")
)
_MINUTE = 60.0
# Maximum remembered clients without a key; the longest idle ones are forgotten.
_MAX_ADDRESSES = 4096
_ENTRY = ("key", "requests_per_minute", "tokens_per_minute")


@dataclass(frozen=True)
class Limits:
    """Requests and tokens that a client may use in a minute; None means no limit.

    Attributes:
        requests: Requests for answers or embeddings.
        tokens: Tokens of their prompts and answers.
    """

    requests: int | None = None
    tokens: int | None = None


def keys_of(config: ServerConfig) -> dict[str, Limits]:
    """Returns the keys of a server, with the limits of each.

    Raises:
        InvalidParameterError: The file of keys cannot be read, or an entry of it is wrong.
    """
    default = Limits(config.requests_per_minute, config.tokens_per_minute)
    found = dict.fromkeys(config.api_keys, default)
    if config.api_key_file is not None:
        found |= _read_keys(Path(config.api_key_file), default)
    return found


def _read_keys(path: Path, default: Limits) -> dict[str, Limits]:
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or "it is not YAML"
        raise InvalidParameterError(
            "api_key_file", f"a readable YAML file ({reason})", str(path)
        ) from error
    if not isinstance(entries, list) or not entries:
        raise InvalidParameterError("api_key_file", "a list of keys", str(path))
    found = {}
    for i, entry in enumerate(entries):
        where = f"entry {i} of api_key_file"
        given = entry if isinstance(entry, dict) else {"key": entry}
        for name in given:
            if name not in _ENTRY:
                raise InvalidParameterError(where, f"of {', '.join(_ENTRY)}", name)
        key = given.get("key")
        if not isinstance(key, str) or not key.strip() or not key.isprintable():
            # The value may be a key without quotes, so it is not shown.
            raise InvalidParameterError(where, "a key: a printable text in quotes", "(not shown)")
        limits = []
        for name, otherwise in zip(_ENTRY[1:], (default.requests, default.tokens)):
            limit = given.get(name, otherwise)
            is_limit = isinstance(limit, int) and not isinstance(limit, bool) and limit >= 1
            if limit is not None and not is_limit:
                raise InvalidParameterError(f"{name} in {where}", "an integer of at least 1", limit)
            limits.append(limit)
        found[key] = Limits(*limits)
    return found


class _Allowance:
    """The rest of an allowance, which refills over time.

    Args:
        limit: Allowance for a minute, and the maximum at once.
    """

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self._level = float(limit)  # below 0 if more was used than available
        self._at = now

    def level(self, now: float) -> float:
        filled = self._level + (now - self._at) * self.limit / _MINUTE
        self._level, self._at = min(filled, float(self.limit)), now
        return self._level

    def take(self, amount: int, now: float) -> None:
        self._level = self.level(now) - amount

    def seconds_until(self, level: float, now: float) -> float:
        return max(0.0, (level - self.level(now)) * _MINUTE / self.limit)


class Budget:
    """The requests and tokens that one client has left."""

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self._clock = time.monotonic
        now = self._clock()
        self._metrics = metrics
        given = {"requests": limits.requests, "tokens": limits.tokens}
        self._allowances = {
            unit: _Allowance(limit, now) for unit, limit in given.items() if limit is not None
        }

    def admit(self) -> None:
        """Counts a request.

        Raises:
            ApiError: 429, the allowance is used up.
        """
        now = self._clock()
        for unit, allowance in self._allowances.items():
            wait = allowance.seconds_until(1, now)
            if wait > 0:
                self._metrics.rejected.labels("rate_limit").inc()
                seconds = max(1, math.ceil(wait))
                raise ApiError(
                    429,
                    f"rate limit reached: {allowance.limit} {unit} per minute; try again in "
                    f"{seconds} s",
                    code="rate_limit_exceeded",
                    headers={"Retry-After": str(seconds)},
                )
        if "requests" in self._allowances:
            self._allowances["requests"].take(1, now)

    def charge(self, num_tokens: int) -> None:
        """Counts tokens that were used."""
        if "tokens" in self._allowances:
            self._allowances["tokens"].take(num_tokens, self._clock())

    @property
    def headers(self) -> dict[str, str]:
        """Headers with limits, rests and times, named as in OpenAI's API."""
        now, found = self._clock(), {}
        for unit, allowance in self._allowances.items():
            found[f"x-ratelimit-limit-{unit}"] = str(allowance.limit)
            found[f"x-ratelimit-remaining-{unit}"] = str(max(0, int(allowance.level(now))))
            until_full = allowance.seconds_until(allowance.limit, now)
            found[f"x-ratelimit-reset-{unit}"] = _duration(until_full)
        return found


class RateLimitMiddleware:
    """Counts requests, and refuses those beyond their client's limits.

    Args:
        keys: Limits of each key, by the digest from `KeyMiddleware`.
        default: Limits of clients without a key, by their address.
        paths: Paths whose POST requests are limited.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Mapping[bytes, Limits],
        default: Limits,
        metrics: Metrics,
        paths: Sequence[str],
    ) -> None:
        self._app = app
        self._default = default
        self._metrics = metrics
        self._paths = frozenset(paths)
        self._by_key = {key: Budget(limits, metrics) for key, limits in keys.items()}
        self._by_address: OrderedDict[str, Budget] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_request = scope["type"] == "http" and scope["method"] == "POST"
        path = scope["path"].removeprefix(scope.get("root_path", "")) if "path" in scope else ""
        if path not in self._paths or not (is_request or scope["type"] == "websocket"):
            await self._app(scope, receive, send)
            return
        budget = self._budget_of(scope)
        scope["state"]["budget"] = budget
        if not is_request:  # a WebSocket counts its turns
            await self._app(scope, receive, send)
            return

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(budget.headers)
            await send(message)

        try:
            budget.admit()
        except ApiError as error:
            await error.response(scope)(scope, receive, send_with_limits)
            return
        await self._app(scope, receive, send_with_limits)

    def _budget_of(self, scope: Scope) -> Budget:
        key = scope["state"].get("key")
        if key is not None:
            return self._by_key[key]
        address = (scope.get("client") or ("",))[0]
        budget = self._by_address.pop(address, None) or Budget(self._default, self._metrics)
        self._by_address[address] = budget
        if len(self._by_address) > _MAX_ADDRESSES:
            self._by_address.popitem(last=False)
        return budget


def budget_of(scope: Any) -> Budget | None:
    """Returns the budget of a request's client; None if it is not limited."""
    found: Budget | None = scope["state"].get("budget")
    return found


def _duration(seconds: float) -> str:
    """As OpenAI's headers have it: 6m0s, 1s, 20ms."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms" if seconds > 0 else "0s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
