"""The agent of the live tests; a run imports it in the agent's process."""

import asyncio
import os
from pathlib import Path
from typing import Any

import aiohttp

from offbeat import AgentClient


async def asks_twice(task: dict[str, Any], client: AgentClient, *, stops_at: str = "") -> float:
    """Ask the model two questions; the reward is the share of answers with a digit.

    A task that says ``begins_anew`` is asked the second one in a conversation of its own.
    While a file ``stops_at`` exists, an episode takes it between its two questions, leaves its
    process id beside it, and goes on once there is one of the same name with suffix ``.go``.
    """
    headers = {"Authorization": f"Bearer {client.api_key}"}
    messages, digits = list[dict[str, Any]](), 0
    async with aiohttp.ClientSession(headers=headers, raise_for_status=True) as http:
        for turn in range(2):
            if turn and stops_at and _taken(Path(stops_at)):
                await _released(Path(stops_at).with_suffix(".go"))
            question = task["question"]
            if turn and task.get("begins_anew"):
                messages, question = [], 2 * question  # the same request would get the same answer
            messages.append({"role": "user", "content": question})
            body = {"model": client.model, "messages": messages}
            async with http.post(f"{client.base_url}/chat/completions", json=body) as response:
                messages.append((await response.json())["choices"][0]["message"])
            digits += any(letter.isdigit() for letter in messages[-1]["content"])
    return digits / 2


async def _released(file: Path) -> None:
    """Wait for a file of another process, which nobody else tells of."""
    while not file.exists():  # noqa: ASYNC110 - see above
        await asyncio.sleep(0.02)


def _taken(file: Path) -> bool:
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    waiting = file.with_suffix(".writing")
    waiting.write_text(str(os.getpid()))
    waiting.rename(file.with_suffix(".pid"))
    return True
