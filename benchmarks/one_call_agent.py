"""The agent of ``open_episodes``: it asks the model once."""

from typing import Any

import aiohttp

from offbeat.environments.environment_plugin import AgentClient


async def run(_task: dict[str, Any], client: AgentClient) -> float:
    """Ask the model once, over a connection of its own."""
    headers = {"Authorization": f"Bearer {client.api_key}"}
    body = {"model": client.model, "messages": [{"role": "user", "content": "1+2="}]}
    async with (
        aiohttp.ClientSession(headers=headers, raise_for_status=True) as http,
        http.post(f"{client.base_url}/chat/completions", json=body) as response,
    ):
        await response.read()
    return 1.0
