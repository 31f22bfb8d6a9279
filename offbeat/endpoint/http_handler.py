"""The HTTP of one connection; what is no HTTP is refused in OpenAI's form."""

import asyncio
from http import HTTPStatus
from typing import Any, Final, cast

import msgspec
from aiohttp import web

from offbeat.endpoint.errors import RequestRefused

_KEEP_ALIVE_S: Final = 75.0
"""Limit between two requests: longer than clients keep a connection (OpenAI's 5 s, aiohttp 15 s)."""


class HttpHandler(web.RequestHandler):
    """Reads requests from one connection and writes their answers."""

    __slots__ = ()

    def __init__(self, manager: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        nowhere = cast("Any", None)  # aiohttp's way to switch a log off, which its types leave out
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
        """Answer what could not be read as a request, and close the connection.

        It is not logged: a client that sends many such would fill the disk.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has been begun")
        problem = f"this is no HTTP request: {message or exc!r:.200}"
        refused = RequestRefused(HTTPStatus(status), "malformed_request", problem)
        answer = web.Response(
            body=msgspec.json.encode(refused.body), status=status, content_type="application/json"
        )
        answer.force_close()
        return answer
