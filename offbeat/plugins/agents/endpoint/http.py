"""HTTP of the endpoint: the handler, its requirements for requests, and the errors it sends."""

import asyncio
from http import HTTPStatus
from typing import Any, Final, cast

import msgspec
from aiohttp import HttpVersion10, HttpVersion11, hdrs, web

from offbeat.messages.failures import InvalidRequest, OffbeatError, RolloutFailed, StrayMediaToken
from offbeat.plugins.agents.endpoint.chat_bridge import TemplateRefused
from offbeat.plugins.agents.endpoint.errors import LimitExceeded, RequestRefused, SessionFinished

_KEEP_ALIVE_S: Final = 75.0
"""Maximum time between two requests. It is longer than clients keep a connection: OpenAI 5 s,
aiohttp 15 s."""


class HttpHandler(web.RequestHandler):
    """Reads requests from one connection and writes their answers."""

    def __init__(self, manager: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        nowhere = cast("Any", None)  # aiohttp's way to switch off a log, which its types omit
        super().__init__(
            manager,
            loop=loop,
            keepalive_timeout=_KEEP_ALIVE_S,
            access_log=nowhere,
            auto_decompress=False,  # a small body may become gigabytes; the server refuses them
        )

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer data that could not be read as a request, and close the connection.

        Nothing is logged, because a client that sends many such requests would fill the disk.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has been begun")
        problem = f"this is not an HTTP request: {message or exc!r:.200}"
        return _last_answer(HTTPStatus(status), "malformed_request", problem)


_VERSIONS: Final = (HttpVersion10, HttpVersion11)
_CONTINUE: Final = "100-continue"


def answer_to_version(request: web.Request) -> web.StreamResponse | None:
    """Return the refusal of an unsupported HTTP version, or None if it is supported.

    aiohttp also accepts 0.9 and 2.0, and would write their numbers into its answer.
    """
    major, minor = request.version
    if request.version in _VERSIONS:
        return None
    status, code = HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "http_version_not_supported"
    return _last_answer(status, code, f"HTTP/{major}.{minor} is not spoken here: use HTTP/1.1")


async def check_expect(request: web.Request) -> web.StreamResponse | None:
    """Return the refusal of an ``Expect`` header, or None if it is met.

    After a refusal, the client may or may not send the body.
    """
    value = request.headers.get(hdrs.EXPECT, "")
    if value.lower() != _CONTINUE:
        problem = f"Expect: {value!r:.80} is not met here: leave it out, or send {_CONTINUE}"
        return _last_answer(HTTPStatus.EXPECTATION_FAILED, "expectation_failed", problem)
    if request.version == HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer has not begun
    return None


def _last_answer(status: HTTPStatus, code: str, problem: str) -> web.Response:
    body = msgspec.json.encode(RequestRefused(status, code, problem).body)
    answer = web.Response(body=body, status=status, content_type="application/json")
    answer.force_close()
    return answer


CONTEXT_LENGTH_EXCEEDED: Final = "context_length_exceeded"
"""Error code by which agent frameworks detect that a conversation is too long."""


def make_refusal(error: Exception) -> RequestRefused | None:
    """Return the answer to a request with a failed turn, or None for a bug of this package."""
    match error:
        case SessionFinished():
            status, code = HTTPStatus.UNAUTHORIZED, "sample_finished"
        case (
            LimitExceeded(limit="max_sample_tokens" | "max_branches")
            | RolloutFailed(reason="prompt_too_long")
        ):
            return too_long(str(error))
        case LimitExceeded():
            status, code = HTTPStatus.TOO_MANY_REQUESTS, error.limit
        case TemplateRefused():
            status, code = HTTPStatus.BAD_REQUEST, "template_refused"
        case StrayMediaToken():
            message = f"{error.detail}. An agent's messages are only text"
            return RequestRefused(HTTPStatus.BAD_REQUEST, error.reason, message, "messages")
        case InvalidRequest() | RolloutFailed(reason="prompt_empty"):
            status, code = HTTPStatus.BAD_REQUEST, "invalid_request"
        case OffbeatError():
            status, code = HTTPStatus.SERVICE_UNAVAILABLE, "engine_unavailable"
        case _:
            return None
    return RequestRefused(status, code, str(error))


def too_long(problem: str) -> RequestRefused:
    """Return the refusal of a conversation that is too long."""
    return RequestRefused(HTTPStatus.BAD_REQUEST, CONTEXT_LENGTH_EXCEEDED, problem, "messages")
