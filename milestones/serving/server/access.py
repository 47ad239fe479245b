"""The access to the server: the names that it is called by, and the pages of other sites.

A web page may let its own name point to 127.0.0.1 (DNS rebinding). The browser of a user then
sends the page's calls to this server. Such a call has the name of the page as `Host`, or as
`Origin`. A `Host` that is an IP address is no name, so no page can own it.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError
from .limits import Guard, refuse
from .settings import ServerSettings

LOOPBACK = ("localhost", "*.localhost", "ip6-localhost", "localhost.localdomain")


class KnownNames:
    """ASGI middleware that refuses a foreign `Host` (421) and a foreign `Origin` (403)."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app = app
        self._hosts = [*LOOPBACK, settings.host.lower(), *names(settings.allowed_hosts)]
        self._origins = names(settings.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(Headers(scope=scope))
            except ApiError as error:
                await refuse(error, scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check(self, headers: Headers) -> None:
        host = headers.get("host", "").lower()
        name = without_port(host)
        if name and not _is_address(name) and not any(_matches(name, one) for one in self._hosts):
            raise ApiError(
                421, f"this server is not called {name[:100]!r}: start it with --allowed-hosts and "
                "this name", code="unknown_host",
            )  # fmt: skip
        origin = headers.get("origin", "").lower()
        if origin and origin not in self._origins and origin.partition("://")[2] != host:
            raise ApiError(
                403, f"pages of {origin[:100]!r} may not use this server: start it with "
                "--allowed-origins and this origin", code="foreign_origin",
            )  # fmt: skip


def middleware(settings: ServerSettings) -> list[Middleware]:
    """Return what a call passes before its route, in order."""
    found: list[Any] = [Middleware(KnownNames, settings=settings)]
    if origins := names(settings.allowed_origins):
        found.append(
            Middleware(
                CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type"],
            )
        )  # fmt: skip
    return [*found, Middleware(Guard, settings=settings)]


def names(text: str | None) -> list[str]:
    """Return the names in a setting, which are separated by commas."""
    return [name.strip().lower() for name in (text or "").split(",") if name.strip()]


def without_port(host: str) -> str:
    """Return the name or the address of a `Host` header."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _matches(name: str, allowed: str) -> bool:
    return name.endswith(allowed[1:]) if allowed.startswith("*.") else name == allowed
