"""An agent with OpenAI's client, as a user writes it; a test runs it in the agent's process."""
# openai comes with the extra agents; types are checked without it as well.
# pyright: reportMissingImports=false

from typing import Any

from openai import AsyncOpenAI

from offbeat import AgentClient


async def converses(task: dict[str, Any], client: AgentClient) -> dict[str, float]:
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as model:
        for _ in range(2):
            answer = await model.chat.completions.create(model=client.model, messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "and then?"}]
    return {"reward": 1.0, "messages": len(messages)}
