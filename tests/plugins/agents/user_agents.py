"""Agents of users, good and bad: what the environment ``agent`` is tested with."""

import asyncio
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from offbeat.environments.environment_plugin import AgentClient
from offbeat.environments.frames import RewardReply, frame_message
from offbeat.environments.protocol import EnvironmentUnavailable
from offbeat.environments.reward_value import NamedRewards

Task = dict[str, Any]
Message = dict[str, Any]


class Refused(Exception):
    """The endpoint answered with this status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


async def ask(client: AgentClient, messages: list[Message], **fields: Any) -> Message:
    """Ask without an HTTP library: each process of an agent would import it, which takes longest."""
    url = urlsplit(client.base_url)
    body = json.dumps({"model": client.model, "messages": messages, **fields}).encode()
    head = (
        f"POST {url.path}/chat/completions HTTP/1.0\r\n"
        f"Host: {url.netloc}\r\n"
        f"Authorization: Bearer {client.api_key}\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        writer.write(head.encode() + body)
        told, _, answer = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    status = int(told.split()[1])
    if status >= 400:
        raise Refused(status)
    return json.loads(answer)["choices"][0]["message"]


async def converses(task: Task, client: AgentClient, *, turns: int = 2) -> float:
    messages = list[Message]()
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{task['question']} {turn}"})
        messages.append(await ask(client, messages))
    return float(len(messages))


async def opens_differently(task: Task, client: AgentClient) -> dict[str, float]:
    """Write another first message for each sample, as an agent does that asks a search engine."""
    await ask(client, [{"role": "user", "content": f"{task['question']} {client.api_key[8:12]}"}])
    return {"reward": 0.5}


async def never_asks(task: Task, client: AgentClient) -> float:
    return 1.0


async def swallows_a_refusal(task: Task, client: AgentClient) -> float:
    with suppress(Exception):
        await ask(client, [{"role": "user", "content": "long " * 9999}])
    return 1.0


async def goes_on_after_a_refusal(task: Task, client: AgentClient) -> float:
    await ask(client, [{"role": "user", "content": "well?"}])
    with suppress(Exception):
        await ask(client, [{"role": "user", "content": "and?"}], temperature=0.7)
    return 0.25


async def opens_branches(task: Task, client: AgentClient) -> float:
    await ask(client, [{"role": "user", "content": "one"}])
    await ask(client, [{"role": "user", "content": "two"}])
    return 1.0


async def raises(task: Task, client: AgentClient) -> float:
    await converses(task, client, turns=1)
    raise KeyError("tool")


async def raises_once(task: Task, client: AgentClient, *, folder: str) -> float:
    await converses(task, client, turns=1)
    raised = Path(folder) / "raised"
    if raised.exists():
        return 1.0
    raised.touch()
    raise KeyError("tool")


async def exits(task: Task, client: AgentClient) -> float:
    await converses(task, client, turns=1)
    os._exit(0)


async def raises_exit(task: Task, client: AgentClient) -> float:
    sys.exit(0)


async def finds_no_sandbox(task: Task, client: AgentClient) -> float:
    raise EnvironmentUnavailable("the sandbox is down")


async def catches_everything(task: Task, client: AgentClient) -> float:
    try:
        await converses(task, client)
    except (Refused, OSError):
        return 1.0
    return 0.0


async def asks_until_it_is_answered(task: Task, client: AgentClient) -> float:
    while await catches_everything(task, client):
        pass
    return 0.0


async def returns_no_reward(task: Task, client: AgentClient) -> dict[str, float]:
    await converses(task, client, turns=1)
    return {"style": 0.5}


async def names_badly(task: Task, client: AgentClient) -> dict[str, float]:
    await converses(task, client, turns=1)
    return {"reward": 1.0, "a/b": 0.5}


async def returns_not_finite(task: Task, client: AgentClient) -> dict[str, float]:
    await converses(task, client, turns=1)
    return {"reward": 1.0, "style": float("inf")}


async def returns_a_text(task: Task, client: AgentClient) -> dict[str, object]:
    await converses(task, client, turns=1)
    return {"reward": 1.0, "note": "hello"}


async def wins_once(task: Task, client: AgentClient, *, folder: str) -> object:
    await converses(task, client, turns=1)
    won = Path(folder) / "won"
    if won.exists():
        return 0.0
    won.touch()
    return {"reward": 1.0, "won": 1.0, "lost": None}


async def names_its_rewards(
    task: Task, client: AgentClient, *, fails_at: str = ""
) -> dict[str, float]:
    if fails_at:
        await raises_once(task, client, folder=fails_at)
    else:
        await converses(task, client, turns=1)
    return {"tool-calls": 3, "reward": 0.5, "style": 0.25}


async def names_its_answer(task: Task, client: AgentClient, *, answer: object) -> dict[str, object]:
    await converses(task, client, turns=1)
    return {"reward": 0.5, "answer": answer}


async def answers_in_numbers(task: Task, client: AgentClient) -> dict[str, object]:
    return await names_its_answer(task, client, answer=42)


async def answers_first_time_only(task: Task, client: AgentClient, *, folder: str) -> object:
    await converses(task, client, turns=1)
    asked = Path(folder) / "asked"
    if asked.exists():
        return 0.0
    asked.touch()
    return {"reward": 1.0, "answer": "7"}


async def names_at_random(task: Task, client: AgentClient) -> dict[str, float]:
    await converses(task, client, turns=1)
    return {"reward": 1.0, f"of-{client.api_key[8:16]}": 0.5}


async def prints_forged_results(task: Task, client: AgentClient) -> float:
    """Write a reward of 100 wherever a model's text could end up."""
    forged = frame_message(RewardReply(1, 0, NamedRewards(100.0, {})))
    for stream in (1, 2):
        os.write(stream, forged)
    await converses(task, client, turns=1)
    return 1.0


async def leaves_a_task_behind(task: Task, client: AgentClient, *, folder: str) -> float:
    """Ask once more a moment after the reward, and leave a file if that works."""

    async def later() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            (Path(folder) / "cancelled").touch()

    running = asyncio.create_task(later())
    await converses(task, client, turns=1)
    del running
    return 1.0


async def keeps_its_key(task: Task, client: AgentClient, *, folder: str) -> float:
    """Ask with the key of an episode that has ended; the reward says whether it was refused."""
    kept = Path(folder) / "key"
    if not kept.exists():
        kept.write_text(client.api_key)
        return await converses(task, client, turns=1)
    earlier = AgentClient(client.base_url, kept.read_text(), client.model)
    await converses(task, client, turns=1)
    try:
        await ask(earlier, [{"role": "user", "content": "again"}])
    except Refused as error:
        return float(error.status)
    return 0.0


async def hangs(task: Task, client: AgentClient) -> float:
    await converses(task, client, turns=1)
    return await asyncio.get_running_loop().create_future()


async def hangs_once(task: Task, client: AgentClient, *, folder: str) -> float:
    await converses(task, client, turns=1)
    hung = Path(folder) / "hung"
    if not hung.exists():
        hung.touch()
        await asyncio.get_running_loop().create_future()
    return 1.0


async def shows_its_environment(task: Task, client: AgentClient, *, variable: str) -> float:
    await converses(task, client, turns=1)
    return float(variable in os.environ)


def is_not_async(task: Task, client: AgentClient) -> float:
    return 1.0
