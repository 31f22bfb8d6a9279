"""HTTP server: one per process, many samples, one bearer token per sample.

| who            | waits for                      | woken by                                       |
|----------------|--------------------------------|------------------------------------------------|
| a connection   | a head, at most a deadline     | the client, or one that needs its place        |
| a request      | its body, at most a deadline   | the client                                     |
| a request      | the engine                     | the engine, or its cancel: the client is gone  |
| an answer      | room to write, a deadline      | the client                                     |

The token in a request identifies the sample. So an agent needs no change other than the two
settings that every client has: ``base_url`` and ``api_key``.

Also manages the folders of endpoints' Unix sockets, which outlive a worker that is killed.

An endpoint that starts removes the folders of dead endpoints: their sockets refuse connections. A
socket gets its name only when its endpoint listens.
"""

import asyncio
import hmac
import secrets
import shutil
import socket
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog
from aiohttp import web

from offbeat.plugins.agents.endpoint import responses
from offbeat.plugins.agents.endpoint.connections import Connection, Connections
from offbeat.plugins.agents.endpoint.errors import LimitExceeded, RequestRefused, SessionFinished
from offbeat.plugins.agents.endpoint.http import (
    answer_to_version,
    check_expect,
    make_refusal,
    too_long,
)
from offbeat.plugins.agents.endpoint.requests import (
    ChatRequest,
    TokenRequest,
    decode_body,
    reading_body,
)
from offbeat.plugins.agents.endpoint.session import (
    Branch,
    ChatTurn,
    SampleSession,
    SharedCalls,
    TokenTurn,
    Turn,
)

SOCKET: Final = "endpoint.sock"
UNNAMED: Final = "starting.sock"
"""Name of the socket of an endpoint that does not listen yet."""

_SOCKET_FOLDERS_PREFIX: Final = "offbeat-endpoint-"


def new_socket_folder() -> Path:
    """Create a folder that only its owner can access."""
    return Path(tempfile.mkdtemp(prefix=_SOCKET_FOLDERS_PREFIX))


def remove_abandoned_sockets() -> None:
    """Remove this user's folders of endpoints that belong to an ended process."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_SOCKET_FOLDERS_PREFIX}*"):
        if _is_abandoned(folder / SOCKET):
            shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(0)  # a busy endpoint is alive
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # busy, of another user, deleted, or not named yet
            return False
    return False


log = structlog.stdlib.get_logger()

_PREFIX: Final = "offbeat"
_IO_DEADLINE_S: Final = 60.0
MAX_CONNECTIONS: Final = 1024
_BACKLOG: Final = 128
"""Connections that the system holds before they are accepted."""

_REMEMBERED: Final = 4096
"""Finished samples to remember. A request with the token of one is answered as finished."""

_CHARACTERS_PER_TOKEN: Final = 32
"""Maximum characters of a conversation per token of the window. A longer one is refused before
encoding.
"""

_ROUTES: Final = "served are POST /v1/chat/completions and GET /v1/models"

_FINISHED: Final = (HTTPStatus.UNAUTHORIZED, "sample_finished", str(SessionFinished()))


@dataclass(slots=True, eq=False)
class _Entry:
    session: SampleSession
    calls: SharedCalls
    secret: str = field(repr=False)
    open_requests: int = 0

    @contextmanager
    def open_request(self) -> Generator[None]:
        """Count a request from before its body is read until it is answered.

        If answering it hits a bug, the sample fails, and the answer reports this.

        Raises:
            RequestRefused: Too many requests of the sample are open.
        """
        most = self.session.limits.max_open_requests
        if self.open_requests >= most:
            problem = str(LimitExceeded("max_open_requests", most))
            raise RequestRefused(HTTPStatus.TOO_MANY_REQUESTS, "max_open_requests", problem)
        self.open_requests += 1
        try:
            yield
        except RequestRefused as refused:
            self.session.refused_requests += 1
            self.session.last_refusal = str(refused)
            raise  # the agent's error, or already the sample's failure
        except (web.HTTPException, ConnectionError):
            raise
        except Exception as bug:
            self.session.fail(bug)
            raise
        finally:
            self.open_requests -= 1


class AgentEndpoint:
    """Serves samples over HTTP on the loopback interface, and over a Unix socket.

    All methods belong to one event loop.
    """

    def __init__(
        self,
        model: str,
        *,
        max_request_bytes: int = 16 << 20,
        io_deadline_s: float = _IO_DEADLINE_S,
        head_deadline_s: float = _IO_DEADLINE_S,
    ) -> None:
        """Create the endpoint, which does not listen yet.

        ``io_deadline_s`` bounds how long a client sends a body or receives an answer.
        ``head_deadline_s`` bounds the head of a request. On a connection that was used before, it
        counts from the head's first byte.
        """
        self.model = model
        self._max_request_bytes, self._io_deadline_s = max_request_bytes, io_deadline_s
        self._entries: dict[str, _Entry] = {}
        self._finished: dict[str, None] = {}  # ordered
        self._head_deadline_s = head_deadline_s
        self._connections = Connections(0, head_deadline_s)
        self._runner: web.AppRunner | None = None
        self._servers: list[asyncio.Server] = []
        self._socket_folder: Path | None = None
        self.port = 0

    # --- start and stop ---------------------------------------------------------------------------

    async def start(self, max_connections: int = MAX_CONNECTIONS) -> None:
        """Listen on a free port of 127.0.0.1 and on ``socket_path``.

        ``max_connections`` bounds the open connections of both together. Each needs a descriptor.
        """
        app = web.Application(
            middlewares=[self._in_openai_form], client_max_size=self._max_request_bytes
        )
        add = app.router.add_route
        add("GET", "/v1/models", self._models, expect_handler=check_expect)
        add("POST", "/v1/chat/completions", self._chat, expect_handler=check_expect)
        add("POST", "/inference/v1/generate", self._generate, expect_handler=check_expect)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        self._runner = runner
        server, loop = runner.server, asyncio.get_running_loop()
        assert server is not None, "set up"  # noqa: S101
        connections = self._connections = Connections(max_connections, self._head_deadline_s)
        make = partial(Connection, server, loop, connections)
        tcp = await loop.create_server(make, "127.0.0.1", 0, backlog=_BACKLOG)
        self._servers.append(tcp)
        self.port = tcp.sockets[0].getsockname()[1]
        remove_abandoned_sockets()
        self._socket_folder = new_socket_folder()
        path = self._socket_folder / UNNAMED
        unix = await loop.create_unix_server(make, str(path), backlog=_BACKLOG)
        self._servers.append(unix)
        path.chmod(0o600)
        path.rename(self.socket_path)

    async def close(self) -> None:
        """Cancel every request and stop listening."""
        for entry in self._entries.values():
            await entry.calls.close()
        self._entries.clear()
        for server in self._servers:
            server.close()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._socket_folder is not None:
            shutil.rmtree(self._socket_folder, ignore_errors=True)

    @property
    def base_url(self) -> str:
        """Return the ``base_url`` of an OpenAI client."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def socket_path(self) -> Path:
        """Return the Unix socket, which only this user can open."""
        assert self._socket_folder is not None, "start first"  # noqa: S101
        return self._socket_folder / SOCKET

    @property
    def connections(self) -> int:
        """Return the number of open connections."""
        return len(self._connections)

    # --- samples ----------------------------------------------------------------------------------

    def open(self, session: SampleSession) -> str:
        """Open a sample; return the ``api_key`` that its agent sends."""
        name, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        self._entries[name] = _Entry(session, SharedCalls(session), secret)
        return f"{_PREFIX}.{name}.{secret}"

    async def finish(self, api_key: str) -> tuple[Branch, ...]:
        """End a sample: cancel its requests, refuse its token, return its branches."""
        name = api_key.split(".")[1]
        entry = self._entries.pop(name)
        self._finished[name] = None
        while len(self._finished) > _REMEMBERED:
            del self._finished[next(iter(self._finished))]
        branches = entry.session.finish()
        await entry.calls.close()
        return branches

    # --- requests ---------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.StreamResponse:
        engine = self._authorise(request).session.engine
        return _json(responses.models(self.model, engine.max_model_len))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        entry = self._authorise(request)
        with entry.open_request():
            session = entry.session
            body = await self._body(request)
            with reading_body():
                asked = decode_body(body, ChatRequest)
                self._check_model(asked.model)
                turn = asked.turn(session.engine.sampling)
                _check_length(session, turn)
            answer = await _answer(request, entry, turn, lambda: session.chat(turn))
            if asked.stream:
                events = responses.chunks(answer, asked, self.model, session.bridge)
                stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                return await self._sent(request, stream, b"".join(events))
            completion = responses.chat_completion(answer, asked, self.model, session.bridge)
            return await self._sent(request, _json(completion))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        entry = self._authorise(request)
        with entry.open_request():
            session = entry.session
            body = await self._body(request)
            with reading_body():
                asked = decode_body(body, TokenRequest)
                self._check_model(asked.model or self.model)
                turn = asked.turn(session.engine.sampling)
            answer = await _answer(request, entry, turn, lambda: session.continue_tokens(turn))
            return await self._sent(request, _json(responses.token_completion(answer)))

    def _authorise(self, request: web.Request) -> _Entry:
        """Return the sample of a request's token, before any part of the body is read.

        Raises:
            RequestRefused: The token is missing, unknown or finished, or on too many connections.
        """
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        prefix, _, rest = token.strip().partition(".")
        name, _, secret = rest.partition(".")
        if scheme.lower() != "bearer" or not token:
            problem = "send the sample's token as Authorization: Bearer ..."
            raise RequestRefused(HTTPStatus.UNAUTHORIZED, "missing_api_key", problem)
        entry = self._entries.get(name)
        if entry is not None and prefix == _PREFIX:
            # bytes, because strings that are not ASCII cannot be compared
            if hmac.compare_digest(secret.encode(errors="replace"), entry.secret.encode()):
                self._recognise(request, name)
                return entry
        elif name in self._finished:
            raise RequestRefused(*_FINISHED)
        problem = "this token belongs to no running sample: send the api_key of the agent's client"
        raise RequestRefused(HTTPStatus.UNAUTHORIZED, "invalid_api_key", problem)

    def _recognise(self, request: web.Request, name: str) -> None:
        try:
            self._connections.recognise(request, name)
        except LimitExceeded as error:
            raise RequestRefused(
                HTTPStatus.TOO_MANY_REQUESTS, error.limit, f"{error}: close unused connections"
            ) from error

    async def _body(self, request: web.Request) -> bytes:
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            problem = f"Content-Encoding {encoding!r:.80} is not read: send the body as it is"
            status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
            raise RequestRefused(status, "unsupported_content_encoding", problem)
        try:
            async with asyncio.timeout(self._io_deadline_s):
                return await request.read()
        except web.RequestPayloadError as error:
            problem = f"the body is malformed: {error!s:.200}"
            raise RequestRefused(HTTPStatus.BAD_REQUEST, "malformed_request", problem) from error
        except TimeoutError as error:
            problem = f"the body took longer than {self._io_deadline_s:g} s"
            raise RequestRefused(HTTPStatus.REQUEST_TIMEOUT, "body_late", problem) from error

    def _check_model(self, model: str) -> None:
        if model != self.model:
            problem = f"the model {model!r:.80} is not served here: use {self.model!r}"
            raise RequestRefused(HTTPStatus.NOT_FOUND, "model_not_found", problem, "model")

    async def _sent(
        self, request: web.Request, response: web.StreamResponse, events: bytes = b""
    ) -> web.StreamResponse:
        """Send an answer. A client that does not read it in time loses its connection."""
        try:
            async with asyncio.timeout(self._io_deadline_s):
                await response.prepare(request)
                if events:
                    await response.write(events)
                await response.write_eof()
        except TimeoutError:  # the answer was sent, but the client does not read it
            response.force_close()
            if request.transport is not None:
                request.transport.abort()
        return response

    @web.middleware
    async def _in_openai_form(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        with self._connections.answering(request):
            return await self._answer_or_refusal(request, handler)

    async def _answer_or_refusal(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        try:
            return answer_to_version(request) or await handler(request)
        except web.HTTPException as error:
            status = HTTPStatus(error.status)
            code = error.reason.lower().replace(" ", "_")
            problem = f"{error.reason}: {request.path:.80}; {_ROUTES}"
            refused = RequestRefused(status, code, problem)
        except RequestRefused as error:
            refused = error
        except Exception as error:  # noqa: BLE001 -- a bug; the session has it as its failure
            log.error("endpoint.bug", path=request.path, error=repr(error))  # noqa: TRY400
            problem = "the endpoint failed; this sample will not be trained"
            refused = RequestRefused(HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", problem)
        return _json(refused.body, refused.status)


async def _answer(
    request: web.Request,
    entry: _Entry,
    turn: ChatTurn | TokenTurn,
    sample: Callable[[], Coroutine[Any, Any, Turn]],
) -> Turn:
    # OpenAI's clients number their attempts. For other clients, equal requests are one.
    may_repeat = request.headers.get("x-stainless-retry-count") != "0"
    try:
        return await entry.calls.answer(turn, sample, may_repeat=may_repeat)
    except asyncio.CancelledError:
        if entry.session.is_finished:
            raise RequestRefused(*_FINISHED) from None
        raise
    except Exception as error:
        refused = make_refusal(error)
        if refused is None:
            raise
        raise refused from error


def _check_length(session: SampleSession, turn: ChatTurn) -> None:
    characters = sum(message.characters for message in turn.messages)
    characters += sum(map(len, turn.tools)) + len(turn.variables)
    window = session.engine.max_model_len
    if characters > window * _CHARACTERS_PER_TOKEN:
        raise too_long(f"{characters} characters do not fit into max_model_len={window} tokens")


def _json(body: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    content = msgspec.json.encode(body)
    return web.Response(body=content, status=status, content_type="application/json")
