"""Bytes that no client of OpenAI's sends: each is refused or dropped, and the next honest call is served.

Every attack is written to a socket of its own, with a good token unless it says otherwise.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import aiohttp
import pytest

from offbeat.plugins.agents.endpoint.server import AgentEndpoint
from tests.support.agent_endpoint import DrawnBytes, session

CHAT: Final = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hello"}]})
POST: Final = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer TOKEN\r\n"
GET: Final = "GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer TOKEN\r\n"
LENGTH: Final = f"Content-Length: {len(CHAT)}\r\n"
CHUNKED: Final = f"{POST}Transfer-Encoding: chunked\r\n\r\n"
HIDDEN: Final = "GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
"""A whole request, to be hidden in what another one calls its body."""
LAST: Final = GET + "Connection: close\r\n\r\n"
STATUS: Final = re.compile(rb"HTTP/\d\.\d (\d{3}) ")


@dataclass(frozen=True, slots=True)
class Attack:
    """What is sent, and all that may come back."""

    name: str
    sent: str
    statuses: tuple[int, ...] = (400,)
    code: str | None = "malformed_request"  # of the last answer; None: it is not a refusal
    stays_open: bool = field(default=False, kw_only=True)  # for another request
    turns: int = field(default=0, kw_only=True)  # that the sample then has


def asks(line: str) -> str:
    return f"{line}\r\nHost: x\r\nAuthorization: Bearer TOKEN\r\n\r\n"


ATTACKS: Final[Sequence[Attack]] = [
    # where the body ends
    Attack("two lengths", f"{POST}{LENGTH}Content-Length: 2\r\n\r\n{CHAT}"),
    Attack("one length, twice", f"{POST}{LENGTH}{LENGTH}\r\n{CHAT}"),
    Attack("a list of lengths", f"{POST}Content-Length: 2, 2\r\n\r\n{{}}"),
    Attack("a length with a sign", f"{POST}Content-Length: +2\r\n\r\n{{}}"),
    Attack("a negative length", f"{POST}Content-Length: -1\r\n\r\n{{}}"),
    Attack("a hexadecimal length", f"{POST}Content-Length: 0x2\r\n\r\n{{}}"),
    Attack("an empty length", f"{POST}Content-Length: \r\n\r\n{{}}"),
    Attack(
        "a length with a chunked body",
        f"{POST}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{HIDDEN}",
    ),
    Attack(
        "a chunked body with a length",
        f"{POST}Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n{HIDDEN}",
    ),
    Attack("a coding of a like name", f"{POST}Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"),
    Attack("a coding after a tab", f"{POST}Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n"),
    Attack("a coding before its colon", f"{POST}Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n"),
    Attack("chunked, and then not", f"{POST}Transfer-Encoding: chunked, identity\r\n\r\n{HIDDEN}"),
    Attack(
        "a request in the body of one without a token",
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(HIDDEN)}\r\n\r\n{HIDDEN}",
        (401,),
        "missing_api_key",
        stays_open=True,
    ),
    # sizes of chunks
    Attack("a chunk with a prefix", f"{CHUNKED}0x2\r\n{{}}\r\n0\r\n\r\n"),
    Attack("a chunk with a sign", f"{CHUNKED}+2\r\n{{}}\r\n0\r\n\r\n"),
    Attack("a negative chunk", f"{CHUNKED}-2\r\n{{}}\r\n0\r\n\r\n"),
    Attack("a chunk with a space", f"{CHUNKED}2 \r\n{{}}\r\n0\r\n\r\n"),
    Attack("a chunk without a size", f"{CHUNKED}\r\n{{}}\r\n0\r\n\r\n"),
    Attack("a chunk of too many digits", f"{CHUNKED}{'f' * 40}\r\n{{}}\r\n0\r\n\r\n"),
    Attack("a chunk with a bare line feed", f"{CHUNKED}2\n{{}}\n0\n\n{HIDDEN}"),
    Attack("a chunk longer than its size", f"{CHUNKED}2\r\n{{}}{HIDDEN}"),
    # headers
    Attack("a header without a colon", f"{GET}X-Broken\r\n\r\n"),
    Attack("a header without a name", f"{GET}: a\r\n\r\n"),
    Attack("a folded header", f"{GET}X-Folded: a\r\n b\r\n\r\n"),
    Attack(
        "a folded token",
        "GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer\r\n TOKEN\r\n\r\n",
    ),
    Attack("a space before the first header", "GET /v1/models HTTP/1.1\r\n Host: x\r\n\r\n"),
    Attack("NUL in a value", f"{GET}X: a\0b\r\n\r\n"),
    Attack("NUL in a name", f"{GET}X\0Y: a\r\n\r\n"),
    Attack("NUL in the path", asks("GET /v1/mod\0els HTTP/1.1")),
    Attack("a carriage return in a value", f"{GET}X: a\rb\r\n\r\n"),
    Attack("line feeds alone", HIDDEN.replace("\r\n", "\n")),
    Attack("a huge value", f"{GET}X: {'x' * 100_000}\r\n\r\n"),
    Attack("a huge name", f"{GET}{'x' * 100_000}: 1\r\n\r\n"),
    Attack("a huge path", asks(f"GET /{'x' * 100_000} HTTP/1.1")),
    Attack("a thousand headers", GET + "X: 1\r\n" * 1000 + "\r\n"),
    Attack("no host", "GET /v1/models HTTP/1.1\r\nAuthorization: Bearer TOKEN\r\n\r\n"),
    Attack("two hosts", f"{GET}Host: y\r\n\r\n"),
    Attack(
        "another expectation", f"{POST}{LENGTH}Expect: 200-ok\r\n\r\n", (417,), "expectation_failed"
    ),
    # the first line
    Attack("HTTP 0.9", asks("GET /v1/models HTTP/0.9"), (505,), "http_version_not_supported"),
    Attack(
        "HTTP 2.0 by number", asks("GET /v1/models HTTP/2.0"), (505,), "http_version_not_supported"
    ),
    Attack("the preface of HTTP 2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    Attack("a version that is none", asks("GET /v1/models HTTP/1.10")),
    Attack("a protocol in small letters", asks("GET /v1/models http/1.1")),
    Attack("a method that is none", asks("G@T /v1/models HTTP/1.1")),
    Attack("a method without an end", "X" * 100_000 + " /v1/models HTTP/1.1\r\n\r\n"),
    Attack(
        "a method of debugging",
        asks("TRACE /v1/models HTTP/1.1"),
        (405,),
        "method_not_allowed",
        stays_open=True,
    ),
    Attack(
        "a tunnel", asks("CONNECT example.org:443 HTTP/1.1"), (404,), "not_found", stays_open=True
    ),
    Attack(
        "a path that climbs",
        asks("GET /../../etc/passwd HTTP/1.1"),
        (404,),
        "not_found",
        stays_open=True,
    ),
    Attack(
        "a path that climbs and returns",
        asks("GET /v1/../v1/models HTTP/1.1"),
        (404,),
        "not_found",
        stays_open=True,
    ),
    Attack("a path without a root", asks("GET v1/models HTTP/1.1")),
    Attack(
        "the path of no server", asks("OPTIONS * HTTP/1.1"), (404,), "not_found", stays_open=True
    ),
    Attack("a TLS handshake", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    Attack("no text at all", "\x00\xff\xfe\x01" * 100 + "\r\n\r\n"),
    # HTTP, if an odd one: served, once per request, and from here alone
    Attack(
        "an address of another server",
        asks("GET http://example.org/v1/models HTTP/1.1"),
        (200,),
        None,
        stays_open=True,
    ),
    Attack(
        "the expectation of HTTP",
        f"{POST}{LENGTH}Expect: 100-continue\r\n\r\n{CHAT}",
        (100, 200),
        None,
        turns=1,
        stays_open=True,
    ),
    Attack(
        "an upgrade that is not offered",
        f"{GET}Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        (200,),
        None,
        stays_open=True,
    ),
    Attack(
        "two requests in a row",
        f"{POST}{LENGTH}\r\n{CHAT}{GET}\r\n",
        (200, 200),
        None,
        turns=1,
        stays_open=True,
    ),
    Attack("a hundred in a row", f"{GET}\r\n" * 100, (200,) * 100, None, stays_open=True),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_bytes_that_are_no_honest_request_are_answered_by_a_typed_status(attack: Attack) -> None:
    async def story(endpoint: AgentEndpoint, token: str) -> None:
        nonlocal answers, after
        answers, after = await answers_of(endpoint, attack, token)

    answers, after = b"", b""
    turns = turns_of(story)
    assert statuses_of(answers) == attack.statuses
    assert statuses_of(after) == ((200,) if attack.stays_open else ())
    body = json.loads(answers.rpartition(b"\r\n\r\n")[2])
    assert body.get("error", {}).get("code") == attack.code
    assert turns == attack.turns


@pytest.mark.parametrize(
    "pieces",
    [
        ["G", "E", "T", " "],
        [f"{GET}X-1: 1\r\n", "X-2: 2\r\n", "X-3: 3\r\n"],
        ["\r\n"] * 20,
    ],
    ids=["the first line", "headers", "empty lines"],
)
def test_a_head_that_comes_in_drops_ends_at_its_deadline_which_no_drop_renews(
    pieces: list[str],
) -> None:
    async def story(endpoint: AgentEndpoint, token: str) -> None:
        nonlocal answers
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        rest = asyncio.ensure_future(rest_of(reader))
        while not rest.done():  # drops for ever: the endpoint alone can end it
            for piece in pieces:
                writer.write(piece.replace("TOKEN", token).encode())
            await asyncio.wait({rest}, timeout=0.01)
        answers = rest.result()
        writer.close()

    answers = b""
    assert turns_of(story, head_deadline_s=0.1) == 0
    assert set(statuses_of(answers)) <= {400}


def turns_of(
    story: Callable[[AgentEndpoint, str], Awaitable[None]], *, head_deadline_s: float = 60.0
) -> int:
    """Return the turns of a sample after a story; an honest call is then served."""

    async def main() -> int:
        endpoint = AgentEndpoint("policy", head_deadline_s=head_deadline_s)
        await endpoint.start()
        try:
            sample = session(DrawnBytes())
            token = endpoint.open(sample)
            await story(endpoint, token)
            turns = len(sample.turns)
            assert sample.failure is None
            headers = {"Authorization": f"Bearer {token}"}
            url = f"{endpoint.base_url}/chat/completions"
            async with aiohttp.request("POST", url, data=CHAT, headers=headers) as honest:
                assert honest.status == 200
            return turns
        finally:
            await endpoint.close()

    return asyncio.run(main())


async def answers_of(endpoint: AgentEndpoint, attack: Attack, token: str) -> tuple[bytes, bytes]:
    """Return what comes back, and then what one more request gets on the same connection.

    A request that was hidden in a body would be answered before that one.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    writer.write(attack.sent.replace("TOKEN", token).encode("latin-1"))
    answers = b""
    while len(statuses_of(answers)) < len(attack.statuses) or not is_whole(answers):
        more = await reader.read(1 << 16)
        if not more:
            break
        answers += more
    writer.write(LAST.replace("TOKEN", token).encode())
    after = await rest_of(reader)
    writer.close()
    return answers, after


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """Return what comes until the connection ends, in whatever way."""
    rest = b""
    with contextlib.suppress(ConnectionError):
        while more := await reader.read(1 << 16):
            rest += more
    return rest


def statuses_of(answers: bytes) -> tuple[int, ...]:
    return tuple(map(int, STATUS.findall(answers)))


def is_whole(answers: bytes) -> bool:
    """Return whether the last of these answers has its body."""
    head, _, body = answers.rpartition(b"\r\n\r\n")
    lengths = re.findall(rb"(?i)content-length: (\d+)", head)
    return bool(lengths) and len(body) == int(lengths[-1])
