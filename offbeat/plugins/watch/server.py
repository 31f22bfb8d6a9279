"""Server of the live page. It answers only GET, so nothing of a run can be changed through it.

Only this machine's user may read the live page, and no other web page may. Pure.

Another user of the machine can reach a port on loopback, and any web page can make a browser send
it requests. So loopback requires a random token too. The requested host name must be ours, to
prevent DNS rebinding. A request from a foreign page is recognised by its origin and refused.

A browser sends a cookie to every port of a host, even to another user's server on the machine.
So our cookie belongs to a path that only this server and its browser know.

Also writes the last metrics of each run as Prometheus text.
"""

import contextlib
import hmac
import math
import re
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SHUT_RDWR, socket
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec
import typer

from offbeat.messages.failures import FixableError, OffbeatError
from offbeat.plugins.report.page import body_text, read_web, script_text, style_text
from offbeat.plugins.watch.run_lines import RunLines, last_record
from offbeat.plugins.watch.runs import NoSuchRun, WatchedRuns
from offbeat.runs.directory import JOURNAL, run_around, runs_below, what_to_name
from offbeat.telemetry.records import MetricRecord

_NOT_IN_A_NAME: Final = re.compile(r"[^a-zA-Z0-9_]")


def exposition(records: Iterable[tuple[str, MetricRecord]]) -> str:
    """Return the gauges of all runs in the text format 0.0.4.

    A family's name allows fewer characters than a metric's name. Several metrics may share a family
    (``rewards/a-b`` and ``rewards/a_b``), so the label ``metric`` has the full name.
    """
    families = defaultdict[str, list[tuple[str, str, float]]](list)
    for run, record in records:
        values: Mapping[str, float] = {
            "version": record.version, "record_time_seconds": record.time_s, **record.metrics
        }  # fmt: skip
        for name, value in values.items():
            families[f"offbeat_{_NOT_IN_A_NAME.sub('_', name)}"].append((run, name, value))
    lines = list[str]()
    for family in sorted(families):
        lines.append(f"# TYPE {family} gauge")
        lines += [
            f'{family}{{run="{_escaped(run)}",metric="{_escaped(name)}"}} {_number(value)}'
            for run, name, value in families[family]
        ]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))


COOKIE: Final = "offbeat_watch"
_LOOPBACK: Final = ("127.0.0.1", "localhost")
_TOKEN_BYTES: Final = 24
_COOKIE_CHARACTERS: Final = 8192
"""Maximum length of a request's cookies, including cookies of other servers on this host. Longer
ones are not read."""


class Access(msgspec.Struct, frozen=True):
    """Secrets and names of one server."""

    hosts: frozenset[str]
    """Accepted values of the header ``Host``."""
    token: str
    """Token of the first URL. Programs send it as bearer token."""
    cookie: str
    """Cookie value that a browser sends after it has shown the token."""

    path_prefix: str
    """Path of the pages for a browser, which sends the cookie only below it."""

    @classmethod
    def create(cls, host: str, port: int) -> "Access":
        """Draw the secrets of a server that listens on ``host``."""
        names = {host, *_LOOPBACK} if host in _LOOPBACK else {host}
        hosts = frozenset(f"{name}:{port}" for name in names)
        draw = secrets.token_urlsafe
        return cls(hosts, draw(_TOKEN_BYTES), draw(_TOKEN_BYTES), f"/{draw(_TOKEN_BYTES)}")

    def refusal(self, headers: Mapping[str, str]) -> HTTPStatus | None:
        """Return the status that refuses a request because of its origin, or None to accept it."""
        if headers.get("Host", "") not in self.hosts:
            return HTTPStatus.MISDIRECTED_REQUEST
        origin = headers.get("Origin")
        if origin is not None and origin not in {f"http://{host}" for host in self.hosts}:
            return HTTPStatus.FORBIDDEN
        return None

    def has_token(self, token: str) -> bool:
        """Return whether a token is the right one."""
        return hmac.compare_digest(token.encode(), self.token.encode())

    def may_read(self, headers: Mapping[str, str]) -> bool:
        """Return whether the request has the cookie of the browser, or the bearer token."""
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        if scheme == "Bearer" and self.has_token(token):
            return True
        # Compared as sent: a cookie parser may need quadratic time, and anybody may send this.
        cookies, wanted = headers.get("Cookie", ""), f"{COOKIE}={self.cookie}".encode()
        sent = cookies.split(";") if len(cookies) <= _COOKIE_CHARACTERS else ()
        return any(
            hmac.compare_digest(each.strip().encode(errors="replace"), wanted) for each in sent
        )

    def set_cookie(self) -> str:
        """Return the header that sets the browser's cookie.

        Scripts cannot read the cookie. Requests from other sites do not carry it, and other servers
        of this host do not receive it.
        """
        return f"{COOKIE}={self.cookie}; Path={self.path_prefix}/; HttpOnly; SameSite=Strict"

    def strip_prefix(self, path: str) -> str:
        """Return a path without ``path_prefix``, which programs may omit."""
        below = path.removeprefix(self.path_prefix)
        return below if below.startswith("/") else path


class PageConnections:
    """Open connections of one server, each with a thread. Safe for any number of threads.

    Anyone who reaches the port can open connections and send nothing. Such a connection is closed
    in favour of the next one. A connection that has shown the secret is kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._unauthenticated: dict[socket, None] = {}  # oldest first
        self._authenticated = set[socket]()
        self._lock = threading.Lock()

    def opened(self, connection: socket) -> bool:
        """Accept a connection, and close the oldest unauthenticated one if there are too many.

        Returns:
            False if all connections are authenticated, so that no room is left.
        """
        with self._lock:
            if len(self._unauthenticated) + len(self._authenticated) >= self._most:
                oldest = next(iter(self._unauthenticated), None)
                if oldest is None:
                    return False
                del self._unauthenticated[oldest]
                with contextlib.suppress(OSError):  # the client has closed it
                    oldest.shutdown(SHUT_RDWR)  # wakes its thread, which closes it
            self._unauthenticated[connection] = None
            return True

    def mark_authenticated(self, connection: socket) -> None:
        """Record that a connection has shown the secret, unless it was closed for another."""
        with self._lock:
            if connection in self._unauthenticated:
                del self._unauthenticated[connection]
                self._authenticated.add(connection)

    def closed(self, connection: socket) -> None:
        """Forget a connection, before its socket is closed."""
        with self._lock:
            self._unauthenticated.pop(connection, None)
            self._authenticated.discard(connection)


MAX_STREAMS: Final = 32
MAX_CONNECTIONS: Final = 128  # each has a thread
_SOCKET_TIMEOUT_S: Final = 30.0  # disconnects a client that neither sends nor reads
_LOOK_S: Final = 1.0  # seconds between two checks of a run's files
_HEARTBEAT_S: Final = 10.0  # detects that the reader of a stream has left
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_HTML, _TEXT, _JSON = "text/html; charset=utf-8", "text/plain; charset=utf-8", "application/json"
Pause = Callable[[float], object]


class WatchServer(ThreadingHTTPServer):
    """Listens on one address, with a thread per connection, up to the limit."""

    daemon_threads = True
    block_on_close = False
    # With the default of 5, a client during a flood waits over a second for the kernel's retry.
    request_queue_size = MAX_CONNECTIONS

    def __init__(
        self, host: str, port: int, runs: WatchedRuns, *, pause: Pause = time.sleep
    ) -> None:
        """Bind the address; port 0 selects a free port."""
        super().__init__((host, port), _Request)
        self.runs, self.lines, self.pause = runs, RunLines(runs), pause
        self.access = Access.create(host, self.server_address[1])
        self.streams = threading.BoundedSemaphore(MAX_STREAMS)
        self.connections = PageConnections(MAX_CONNECTIONS)
        host_in_url = f"[{host}]" if ":" in host else host
        self.url = f"http://{host_in_url}:{self.server_address[1]}/?token={self.access.token}"

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401  the standard library's
        """Serve the connection in a thread, or close it if there are too many."""
        if self.connections.opened(request):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401  the standard library's
        """Close the connection."""
        self.connections.closed(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore broken connections, because no client is left to inform."""


class _Request(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version = "offbeat"
    sys_version = ""
    timeout = _SOCKET_TIMEOUT_S

    server: WatchServer  # pyright: ignore[reportIncompatibleVariableOverride] - it alone makes these handlers

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
        """Write no log, because it would contain the token."""

    def do_GET(self) -> None:
        access, url = self.server.access, urlsplit(self.path)
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # an unread body may follow
        refused = access.refusal(self.headers)  # pyright: ignore[reportArgumentType]
        if refused is not None:
            self._refuse(refused)
        elif url.path == "/" and "token" in (query := parse_qs(url.query)):
            self._enter(query["token"][0])
        elif not access.may_read(self.headers):  # pyright: ignore[reportArgumentType]
            self._refuse(HTTPStatus.FORBIDDEN, "open the address that offbeat watch printed")
        else:
            self.server.connections.mark_authenticated(self.connection)
            path = access.strip_prefix(url.path).strip("/")
            self._answer([unquote(part) for part in path.split("/")])

    def _not_allowed(self) -> None:
        self.close_connection = True  # an unread body may follow
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED)

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = _not_allowed

    def _enter(self, token: str) -> None:
        """Set the cookie of a browser that shows the token, and remove the token from its URL."""
        if not self.server.access.has_token(token):
            self._refuse(HTTPStatus.FORBIDDEN, "this token belongs to another offbeat watch")
            return
        self.server.connections.mark_authenticated(self.connection)
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", f"{self.server.access.path_prefix}/")
        self.send_header("Set-Cookie", self.server.access.set_cookie())
        self.send_header("Content-Length", "0")
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()

    def _answer(self, path: list[str]) -> None:
        try:
            match path:
                case ["run", name, *rest] if len(rest) <= 1:
                    self._answer_runs([name], "".join(rest))
                case ["compare", name, other, *rest] if len(rest) <= 1:
                    self._answer_runs([name, other], "".join(rest))
                case [name] if name in _PAGES:
                    content, kind = _PAGES[name]
                    self._reply(content(self.server), kind)
                case _:
                    self._refuse(HTTPStatus.NOT_FOUND)
        except NoSuchRun:
            self._refuse(HTTPStatus.NOT_FOUND)
        except OffbeatError as error:  # a damaged journal: the message states the fix
            self._refuse(HTTPStatus.CONFLICT, str(error))
        except (ConnectionError, TimeoutError):
            raise  # the reader has left
        except OSError as error:  # another user's file, or just removed
            self._refuse(HTTPStatus.CONFLICT, str(error))

    def _answer_runs(self, names: list[str], wanted: str) -> None:
        """Reply with the page of one or two runs, or with what the page asks for."""
        runs, above = self.server.runs, "../" * len(names)
        match wanted:
            case "":
                for name in names:
                    runs.directory(name)
                self._reply(_document(body_text(), f"{above}app.js", f"{above}app.css"), _HTML)
            case "data":
                self._reply(runs.data(*names), _TEXT)
            case "events":
                self._stream(*names)
            case _:
                self._refuse(HTTPStatus.NOT_FOUND)

    def _stream(self, *names: str) -> None:
        """Send an event whenever one of the runs writes a file."""
        server = self.server
        before = server.runs.signature(*names)
        if not server.streams.acquire(blocking=False):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_STREAMS} pages are open already")
            return
        try:
            self.close_connection = True
            self._head(HTTPStatus.OK, "text/event-stream")
            self.end_headers()
            quiet_s = _HEARTBEAT_S  # the first event tells the browser that the stream is open
            while True:
                now = server.runs.signature(*names)
                if now != before:
                    before, quiet_s = now, 0.0
                    self.wfile.write(b"event: changed\ndata:\n\n")
                elif quiet_s >= _HEARTBEAT_S:
                    quiet_s = 0.0
                    self.wfile.write(b": still here\n\n")
                server.pause(_LOOK_S)
                quiet_s += _LOOK_S
        except (NoSuchRun, ConnectionError, TimeoutError):
            return  # the run was removed, or the reader has left
        finally:
            server.streams.release()

    # --- replies ---------------------------------------------------------------------------------

    def _reply(self, text: str, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        content = text.encode()
        self._head(status, kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, status: HTTPStatus, reason: str = "") -> None:
        self._reply(f"{reason or status.phrase}\n", _TEXT, status)

    def _head(self, status: HTTPStatus, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        for name, value in _HEADERS.items():
            self.send_header(name, value)


def _document(body: str, script: str, style: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>offbeat watch</title><link rel="stylesheet" href="{style}"></head>\n'
        f'{body}\n<script src="{script}"></script></body></html>\n'
    )


def _exposition(server: WatchServer) -> str:
    found = ((name, last_record(directory)) for name, directory in server.runs.readable())
    return exposition((name, record) for name, record in found if record is not None)


_PAGES: Final[dict[str, tuple[Callable[[WatchServer], str], str]]] = {
    "": (lambda _: _document(read_web("runs.html"), "runs.js", "app.css"), _HTML),
    "runs.js": (lambda _: read_web("dom.js") + read_web("runs.js"), "text/javascript"),
    "app.js": (lambda _: script_text(), "text/javascript"),
    "app.css": (lambda _: style_text(), "text/css"),
    "runs": (lambda server: msgspec.json.encode(server.lines.lines()).decode(), _JSON),
    "metrics": (_exposition, "text/plain; version=0.0.4; charset=utf-8"),
}
"""Content and type by path, for paths that belong to no single run."""


_EVERY_ADDRESS: Final = ("0.0.0.0", "::", "")  # noqa: S104  refused
"""Refused hosts: the server compares the host name of a request, and these match none."""


class CannotWatch(FixableError):
    """The live page cannot be served.

    Fix: use a different address of this machine, or a directory of runs.
    """


def check_runs_are_here(directory: Path) -> None:
    """Check that a directory is a run, holds runs, or may receive its first run.

    Raises:
        CannotWatch: It is not a directory, it is inside a run, or only its subfolders hold runs.
    """
    if not directory.is_dir():
        problem = "a file" if directory.exists() else "no such directory"
        raise CannotWatch(
            str(directory), problem, f"{what_to_name(directory)}, or the directory of runs"
        )
    if (directory / JOURNAL).is_dir():
        return
    if run_around(directory) is not None:
        raise CannotWatch(str(directory), "a folder of a run", what_to_name(directory))
    below = runs_below(directory)
    if below and below[0].parent != directory:
        fix = f"Name the directory of runs, {below[0].parent}"
        raise CannotWatch(str(directory), "no run is directly in it", fix)


def serve(directory: Path, host: str, port: int) -> None:
    """Print the address, and serve the runs of a directory until Ctrl-C.

    Raises:
        CannotWatch: The directory cannot hold runs, or the address cannot be listened on.
    """
    check_runs_are_here(directory)
    if host in _EVERY_ADDRESS:
        fix = "Name the one that a browser will open"
        raise CannotWatch(f"--host {host}", "it stands for every address", fix)
    try:
        server = WatchServer(host, port, WatchedRuns.at(directory))
    except OSError as error:
        problem = error.strerror or str(error)
        raise CannotWatch(f"{host}:{port}", problem, "Name another --port or --host") from error
    typer.echo(f"{server.url}\nCtrl-C ends it")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()
