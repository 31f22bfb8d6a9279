"""Connections of the endpoint: floods of them are bounded, and agents are answered meanwhile."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from offbeat.plugins.agents.endpoint.agent_groups import TooFewDescriptors, raise_descriptor_limit
from offbeat.plugins.agents.endpoint.connections import MOST_PER_SAMPLE, Connection, Connections
from offbeat.plugins.agents.endpoint.server import AgentEndpoint
from tests.support.agent_endpoint import DrawnBytes, session

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(slots=True)
class Caller:
    """Somebody who opens connections to an endpoint by hand."""

    endpoint: AgentEndpoint
    key: str
    streams: list[Stream] = field(default_factory=list[Stream])

    async def connect(self) -> Stream:
        stream = await asyncio.open_connection("127.0.0.1", self.endpoint.port)
        self.streams.append(stream)
        return stream

    async def ask(self, stream: Stream, key: str | None = None) -> tuple[int, str]:
        """Send a request; return the status and the code of the error, if it is one."""
        head = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key or self.key}\r\n"
        stream[1].write(f"{head}\r\n".encode())
        return await answer_on(stream)

    async def close(self) -> None:
        for _, writer in self.streams:
            writer.close()


async def answer_on(stream: Stream) -> tuple[int, str]:
    head = (await stream[0].readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length: ")[2].split()[0])
    body: Any = json.loads(await stream[0].readexactly(length))
    return int(head.split()[1]), body.get("error", {}).get("code", "")


@asynccontextmanager
async def calling(max_connections: int) -> AsyncIterator[Caller]:
    endpoint = AgentEndpoint("policy")
    await endpoint.start(max_connections)
    caller = Caller(endpoint, endpoint.open(session(DrawnBytes())))
    try:
        yield caller
    finally:
        await caller.close()
        await endpoint.close()


def play(story: Callable[[Caller], Awaitable[None]], max_connections: int) -> None:
    async def main() -> None:
        async with calling(max_connections) as caller:
            await story(caller)

    asyncio.run(main())


def test_a_flood_of_silent_connections_is_bounded_and_an_agent_is_answered_in_the_midst() -> None:
    async def story(caller: Caller) -> None:
        first = await caller.connect()
        assert await caller.ask(first) == (200, "")
        silent = [await caller.connect() for _ in range(300)]
        agent = await caller.connect()
        assert await caller.ask(agent) == (200, "")
        assert await caller.ask(first) == (200, "")  # it was open before the flood, and stays
        for stream in silent[:292]:  # of 9 places, the two above have one each
            assert await answer_on(stream) == (503, "max_connections")
            assert await stream[0].read() == b""
        assert caller.endpoint.connections == 9

    play(story, max_connections=9)


def test_one_that_has_been_idle_longest_gives_its_place_to_another() -> None:
    async def story(caller: Caller) -> None:
        kept = [await caller.connect() for _ in range(3)]
        for stream in (*kept, kept[0]):
            assert await caller.ask(stream) == (200, "")
        another = await caller.connect()
        assert await caller.ask(another) == (200, "")
        assert await kept[1][0].read() == b""  # without a word
        assert await caller.ask(kept[0]) == (200, "")

    play(story, max_connections=3)


def test_a_connection_beyond_those_that_are_all_being_answered_is_refused_by_name() -> None:
    async def story(caller: Caller) -> None:
        busy = [await caller.connect() for _ in range(2)]
        for _, writer in busy:  # their bodies do not come
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
            writer.write(
                f"{head}Authorization: Bearer {caller.key}\r\nContent-Length: 9\r\n\r\n".encode()
            )
        for reader, _ in busy:
            assert (await reader.readline()).split()[1] == b"100"
        one_more = await caller.connect()
        assert await answer_on(one_more) == (503, "max_connections")
        assert await one_more[0].read() == b""
        busy[0][1].close()
        await busy[0][1].wait_closed()
        while (again := await caller.connect()) and (await again_asked(caller, again)) == 503:
            pass
        assert caller.endpoint.connections == 2

    play(story, max_connections=2)


async def again_asked(caller: Caller, stream: Stream) -> int:
    try:
        return (await caller.ask(stream))[0]
    except (ConnectionError, asyncio.IncompleteReadError):
        return 503


def test_a_sample_has_so_many_connections_and_no_more_while_others_have_theirs() -> None:
    async def story(caller: Caller) -> None:
        own = [await caller.connect() for _ in range(MOST_PER_SAMPLE)]
        for stream in own:
            assert await caller.ask(stream) == (200, "")
        one_more = await caller.connect()
        assert await caller.ask(one_more) == (429, "max_connections")
        other = caller.endpoint.open(session(DrawnBytes()))
        assert await caller.ask(one_more, other) == (200, "")
        # One that another sample has used last counts as that sample's: pools are shared.
        assert await caller.ask(own[0], other) == (200, "")
        assert await caller.ask(await caller.connect()) == (200, "")

    play(story, max_connections=MOST_PER_SAMPLE + 9)


class Transport(asyncio.Transport):
    """A transport to nobody."""

    def write(self, data: Any) -> None: ...
    def close(self) -> None: ...
    def is_closing(self) -> bool:
        return False


def test_a_connection_that_the_server_closes_at_its_keep_alive_gives_its_place_back() -> None:
    async def main() -> None:
        async def answer(request: web.BaseRequest) -> web.Response:
            return web.Response()

        server, open_now = web.Server(answer), Connections(most=4, head_deadline_s=60.0)
        connection = Connection(server, asyncio.get_running_loop(), open_now)
        connection.connection_made(Transport())
        await asyncio.sleep(0)  # its task waits for a request now
        assert (len(open_now), len(server.connections)) == (1, 1)
        connection.force_close()  # as aiohttp does at the keep-alive, and after a failed answer
        connection.connection_lost(None)
        await asyncio.sleep(0)  # its task ends
        await asyncio.sleep(0)
        assert (len(open_now), len(server.connections)) == (0, 0)

    asyncio.run(main())


def test_descriptors_are_raised_for_the_connections_of_all_episodes() -> None:
    assert raise_descriptor_limit(1) >= 256
    assert raise_descriptor_limit(20) >= 20
    with pytest.raises(TooFewDescriptors, match="reward_workers"):
        raise_descriptor_limit(2**63)
