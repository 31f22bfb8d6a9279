"""A worker that is killed leaves the folder of its endpoint's socket; the next endpoint removes it."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from offbeat.plugins.agents.endpoint.server import SOCKET, UNNAMED, AgentEndpoint, new_socket_folder


@pytest.fixture
def ours() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def folder_with_socket(ours: ExitStack, name: str = SOCKET) -> tuple[Path, socket.socket]:
    """A folder as an endpoint makes it, and its socket, which somebody listens on."""
    folder = new_socket_folder()
    listening = ours.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    listening.bind(str(folder / name))
    listening.listen(0)
    ours.callback(folder.rmdir)
    ours.callback((folder / name).unlink)
    return folder, listening


async def started_and_closed() -> None:
    endpoint = AgentEndpoint("policy")
    await endpoint.start()
    assert [each.name for each in endpoint.socket_path.parent.iterdir()] == [SOCKET]
    await endpoint.close()
    assert not endpoint.socket_path.parent.exists()


def test_an_endpoint_removes_the_folders_of_dead_ones() -> None:
    folder = new_socket_folder()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(folder / SOCKET))
        dead.listen()
    asyncio.run(started_and_closed())
    assert not folder.exists()


def test_an_endpoint_that_lives_keeps_its_folder_however_busy_it_is(ours: ExitStack) -> None:
    folder, listening = folder_with_socket(ours)
    for _ in range(3):  # nobody accepts: further clients are turned away
        client = ours.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        client.settimeout(0)
        client.connect_ex(listening.getsockname())
    asyncio.run(started_and_closed())
    assert (folder / SOCKET).exists()


def test_an_endpoint_that_starts_at_the_same_time_keeps_its_folder(ours: ExitStack) -> None:
    folder, listening = folder_with_socket(ours, UNNAMED)
    listening.close()  # as before it listens
    asyncio.run(started_and_closed())
    assert (folder / UNNAMED).exists()
