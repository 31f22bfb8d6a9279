"""The agent: a loop that calls a URL with OpenAI's client, and the reward of its result."""

import json
import re
from functools import cache
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from offbeat import AgentClient

CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "a*b of two whole numbers",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


async def run(task: dict[str, Any], client: AgentClient, *, max_turns: int = 4) -> float:
    """Play one episode of a task, which is a line of tasks.jsonl, and return its reward.

    client.base_url and client.api_key belong to this episode: calls with them are trained.
    """
    model = AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, http_client=connections())
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for _ in range(max_turns):
        answer = await model.chat.completions.create(
            model=client.model, messages=messages, tools=[CALCULATOR]
        )
        said = answer.choices[0].message
        if not said.tool_calls:
            return 1.0 if said.content == str(task["answer"]) else 0.0
        messages.append(said)  # unchanged: an edited history is trained as a second branch
        for call in said.tool_calls:
            content = multiply(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return 0.0


def multiply(arguments: str) -> str:
    """Return the product that a call asks for, or a description of the error for the model."""
    product = re.fullmatch(r"(\d{1,9})\*(\d{1,9})", str(json.loads(arguments).get("expression")))
    return str(int(product[1]) * int(product[2])) if product else "error: write a*b"


@cache
def connections() -> DefaultAsyncHttpxClient:
    """Return the connections of this process. Creating new ones costs more than an episode."""
    return DefaultAsyncHttpxClient()
