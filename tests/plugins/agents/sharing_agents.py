"""Agents whose episodes share a process: what each does to the others."""

import asyncio
import os
import signal
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from offbeat.environments.environment_plugin import AgentClient
from offbeat.environments.frames import RewardReply, frame_message
from offbeat.environments.reward_value import NamedRewards

Task = dict[str, Any]


async def asks_once(task: Task, client: AgentClient, **_: object) -> float:
    headers = {"Authorization": f"Bearer {client.api_key}"}
    body = {"model": client.model, "messages": [{"role": "user", "content": "how many"}]}
    async with (
        aiohttp.ClientSession(headers=headers, raise_for_status=True) as http,
        http.post(f"{client.base_url}/chat/completions", json=body) as response,
    ):
        await response.read()
    return 1.0


def files_in(folder: str) -> list[Path]:
    return list(Path(folder).iterdir())


async def last_one_crashes(
    task: Task, client: AgentClient, *, folder: str, episodes: int, how: str = "exits"
) -> float:
    """Wait in all episodes but the last, which ends the process; later ones return."""
    await asks_once(task, client)
    (Path(folder) / client.api_key[:24]).touch()
    begun = len(files_in(folder))
    if begun == episodes:
        if how == "exits":
            os._exit(3)
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does if memory is short
        asyncio.get_running_loop().call_soon(os._exit, 3)  # while no episode executes
    if begun <= episodes:
        await asyncio.get_running_loop().create_future()
    return 1.0


async def one_hangs(task: Task, client: AgentClient, *, folder: str) -> float:
    """Hang, and leave a file at the end; the other episode waits for it."""
    await asks_once(task, client)
    ended = Path(folder) / "ended"
    if task["hangs"]:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.touch()
    while not ended.exists():
        await asks_once(task, client)
    return 1.0


async def one_blocks(task: Task, client: AgentClient, *, folder: str) -> float:
    """Block the event loop of the process once the other episode waits, at its first try."""
    tried = Path(folder) / "tried"
    while task["hangs"]:
        await asks_once(task, client)
        if tried.exists():
            threading.Event().wait()
    await asks_once(task, client)
    if not tried.exists():
        tried.touch()
        await asyncio.get_running_loop().create_future()
    return 1.0


async def reads(task: Task, client: AgentClient) -> float:
    """Read a pipe in a thread, which no cancellation ends."""
    if task["pipe"]:
        await asyncio.to_thread(Path(task["pipe"]).read_bytes)
    return 1.0


async def answers_for_another(task: Task, client: AgentClient) -> float:
    """Write a reward of an episode that there is not to each socket of this process."""
    for fd in files_in("/proc/self/fd"):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(fd.name)).st_mode):
                os.write(int(fd.name), frame_message(RewardReply(99, 0, NamedRewards(100.0, {}))))
    return await asyncio.get_running_loop().create_future()
