"""An agent that multiplies with a calculator: OpenAI's client, one tool, a loop of turns.

The model is asked in words, *What is 47 times 83 times 61?*, and gets what the calculator answers as
a message. The reward is 1.0 if its last message is the right number and nothing else, else 0.0.
"""
# openai comes with the extra agents; types are checked without it as well.
# pyright: reportMissingImports=false

from functools import cache
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from examples.tiny_calculator.calculator import CALCULATOR, calculate
from offbeat import AgentClient


async def run(task: dict[str, Any], client: AgentClient, *, max_turns: int = 4) -> float:
    """Play one episode and return its reward."""
    model = AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, http_client=connections())
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for _ in range(max_turns):
        answer = await model.chat.completions.create(
            model=client.model, messages=messages, tools=[CALCULATOR]
        )
        said = answer.choices[0].message
        if not said.tool_calls:
            return float(said.content == str(task["answer"]))
        messages.append(said)
        for call in said.tool_calls:
            if call.type == "function":  # no other kind is offered
                result = calculate(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


@cache
def connections() -> DefaultAsyncHttpxClient:
    """Return the connections of this process: making them anew costs more than an episode."""
    return DefaultAsyncHttpxClient()
