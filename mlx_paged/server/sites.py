"""Refuses requests that pages of other sites make through a user's browser.

A browser sends such requests to any reachable address, including loopback, so listening on
127.0.0.1 keeps out other machines but not other sites. Two checks do:

- `Origin` and `Sec-Fetch-Site`, which browsers set and pages cannot, reveal requests of another
  origin. Those that change state or compute are refused.
- `Host` is the name by which a page found this server. A site can point its own name at this
  machine (DNS rebinding), and is then same-origin for the browser. So only known names are served.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_paged.server.errors import ApiError, shorten

# Methods of HTTP that only read.
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_NAME = re.compile(r"[\w-]+(\.[\w-]+)*\.?", re.ASCII)


class SiteMiddleware:
    """Refuses unknown names of this server, and pages of other origins.

    Args:
        hosts: Known names and addresses of this server; None accepts all.
        origins: Other origins whose pages may call it; "*" means any.
    """

    def __init__(
        self, app: ASGIApp, hosts: frozenset[str] | None, origins: Sequence[str] = ()
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_host(headers, scope)
            # Browsers open WebSockets to any site, without asking it first.
            if scope.get("method") not in _SAFE_METHODS:
                check_origin(headers, self._origins)
        except ApiError as error:
            await error.response(scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers, scope: Scope) -> None:
        host = headers.get("host")
        # All browsers send Host; HTTP/1.0 and in-process calls may not.
        if self._hosts is None or host is None:
            return
        name = _name_of(host)
        # A client that connected to an address used no name that could have been pointed here.
        own = scope.get("server") or ("",)
        if name in self._hosts or is_loopback(name) or name == _plain(str(own[0])):
            return
        raise ApiError(
            403,
            f"this server is not known as {shorten(host, 64)!r}, only by its address, as localhost "
            "and by the names of --allowed-hosts",
            code="unknown_host",
        )


def known_hosts(address: str, allowed: Sequence[str]) -> frozenset[str] | None:
    """Returns the names for `SiteMiddleware`.

    Args:
        address: The address that the server listens on. On loopback, names are always checked. Else
            they are checked only if some are given, because the server's names are unknown.
        allowed: Names and addresses besides its own; "*" means any.
    """
    if "*" in allowed or not (allowed or is_loopback(address)):
        return None
    return frozenset({"localhost", *(_name_of(name) for name in allowed)})


def check_origin(headers: Headers, origins: frozenset[str] | None = None) -> None:
    """Refuses a request from a page of another origin.

    Args:
        origins: Other origins whose pages may call ("*": any); None: no others.

    Raises:
        ApiError: 403.
    """
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origins and origin is not None and (origin in origins or "*" in origins):
        return
    # A browser's word on "same-origin" also holds behind a proxy that changes `Host`.
    if site in (None, "none"):
        if origin is None or origin.partition("://")[2].lower() == headers.get("host", "").lower():
            return
    elif site == "same-origin":
        return
    message = f"pages of {shorten(origin or 'another origin', 64)} may not do this"
    if origins is not None:
        message += ": start the server with their origin in --allowed-origins to let them"
    raise ApiError(403, message, code="cross_origin")


def is_loopback(address: str) -> bool:
    """True if something is an address of this machine alone."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_host(name: str) -> bool:
    """True if something is a name or an address, without scheme, port or path."""
    inner = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    return _NAME.fullmatch(name) is not None or _is_address(inner)


def _name_of(host: str) -> str:
    """Returns the name or address in a `Host` header, without its port; "" if there is none."""
    if _is_address(host):
        return _plain(host)
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
    return _plain(name.rstrip("."))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _plain(address: str) -> str:
    """Returns an address in its shortest form; IPv4 within IPv6 as IPv4. Names are as they were."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    return str(getattr(found, "ipv4_mapped", None) or found)
