"""An agent without tools: it asks a chat model for a sum, and once more if the answer is wrong.

The second try sees the first one: two turns of one conversation, through the model's own chat
template. A right answer is worth 1.0 at the first try and 0.5 at the second. The last number said is
the final answer, for the majority vote of an evaluation.
"""
# openai comes with the extra agents; types are checked without it as well.
# pyright: reportMissingImports=false

import re
from functools import cache
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from offbeat import AgentClient

_NUMBER = re.compile(r"\d+", re.ASCII)


async def run(task: dict[str, Any], client: AgentClient) -> dict[str, Any]:
    """Play one episode; return its reward and its final answer."""
    model = AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, http_client=connections())
    ask = f"{task['question']} Answer with the number only."
    messages: list[Any] = [{"role": "user", "content": ask}]
    numbers: list[str] = []
    for reward in (1.0, 0.5):
        answer = await model.chat.completions.create(model=client.model, messages=messages)
        said = answer.choices[0].message
        numbers = _NUMBER.findall(said.content or "")[-1:]
        if numbers == [task["answer"]]:
            return {"reward": reward, "answer": numbers[0]}
        messages += [said, {"role": "user", "content": "That is wrong. Try again."}]
    return {"reward": 0.0, "answer": numbers[0] if numbers else None}


@cache
def connections() -> DefaultAsyncHttpxClient:
    """Return the connections of this process, for all its episodes."""
    return DefaultAsyncHttpxClient()
