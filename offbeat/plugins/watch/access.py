"""Access to the live page: requests of this machine's user, and of nobody's web page. Pure.

Another user of the machine can reach a port on loopback, and any web page can make a browser ask
it. So a random token is demanded on loopback too; the name that was asked for has to be ours,
against rebinding of DNS names; and a request that a foreign page makes is refused by its origin.

A browser sends a cookie to every port of a host, also to a server of another user of the machine.
So ours belongs to a path that only this server and its browser know.
"""

import hmac
import secrets
from collections.abc import Mapping
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from typing import Final

import msgspec

COOKIE: Final = "offbeat_watch"
_LOOPBACK: Final = ("127.0.0.1", "localhost")
_TOKEN_BYTES: Final = 24


class Access(msgspec.Struct, frozen=True):
    """Secrets and names of one server."""

    hosts: frozenset[str]
    """Accepted values of the header ``Host``."""
    token: str
    """Token of the first URL, which a program sends as bearer token."""
    cookie: str
    """Value of the cookie that a browser sends once it has shown the token."""

    path_prefix: str
    """Path below which a browser finds the pages, and below which alone it sends the cookie."""

    @classmethod
    def create(cls, host: str, port: int) -> "Access":
        """Draw the secrets of a server that listens on ``host``."""
        names = {host, *_LOOPBACK} if host in _LOOPBACK else {host}
        hosts = frozenset(f"{name}:{port}" for name in names)
        draw = secrets.token_urlsafe
        return cls(hosts, draw(_TOKEN_BYTES), draw(_TOKEN_BYTES), f"/{draw(_TOKEN_BYTES)}")

    def refusal(self, headers: Mapping[str, str]) -> HTTPStatus | None:
        """Return the status to refuse a request with for where it comes from; None to go on."""
        if headers.get("Host", "") not in self.hosts:
            return HTTPStatus.MISDIRECTED_REQUEST
        origin = headers.get("Origin")
        if origin is not None and origin not in {f"http://{host}" for host in self.hosts}:
            return HTTPStatus.FORBIDDEN
        return None

    def has_token(self, token: str) -> bool:
        """Return whether this is the token."""
        return hmac.compare_digest(token.encode(), self.token.encode())

    def may_read(self, headers: Mapping[str, str]) -> bool:
        """Return whether the request has the cookie of the browser, or the bearer token."""
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        if scheme == "Bearer" and self.has_token(token):
            return True
        try:
            found = SimpleCookie(headers.get("Cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return found is not None and hmac.compare_digest(found.value.encode(), self.cookie.encode())

    def set_cookie(self) -> str:
        """Return the header that gives the browser its cookie.

        Scripts cannot read it, no request that another site causes carries it, and no other server
        of this host is sent it.
        """
        return f"{COOKIE}={self.cookie}; Path={self.path_prefix}/; HttpOnly; SameSite=Strict"

    def strip_prefix(self, path: str) -> str:
        """Return a path without ``path_prefix``, which programs may leave out."""
        below = path.removeprefix(self.path_prefix)
        return below if below.startswith("/") else path
