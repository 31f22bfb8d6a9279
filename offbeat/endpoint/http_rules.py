"""Answers to what a request asks of HTTP itself, its version and ``Expect``; a refusal closes the connection."""

from http import HTTPStatus
from typing import Final

import msgspec
from aiohttp import HttpVersion10, HttpVersion11, hdrs, web

from offbeat.endpoint.errors import RequestRefused

_VERSIONS: Final = (HttpVersion10, HttpVersion11)
_CONTINUE: Final = "100-continue"


def answer_to_version(request: web.Request) -> web.StreamResponse | None:
    """Return the refusal of an HTTP version that this server does not support; None: it does.

    aiohttp reads 0.9 and 2.0 as well, and would write their numbers into its answer.
    """
    major, minor = request.version
    if request.version in _VERSIONS:
        return None
    status, code = HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "http_version_not_supported"
    return _last_answer(status, code, f"HTTP/{major}.{minor} is not spoken here: use HTTP/1.1")


async def expected(request: web.Request) -> web.StreamResponse | None:
    """Return the refusal of what a request expects; None: it is met.

    After a refusal it is not known whether the body follows.
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
