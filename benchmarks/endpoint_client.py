"""The client process of ``benchmarks.endpoint``: conversations by aiohttp alone, or OpenAI's client.

python -m benchmarks.endpoint_client URL KEYS CALLS
"""

import asyncio
import contextlib
import importlib
import json
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

PROMPT: Final = tuple(range(4, 28))  # as long as a first prompt of the quickstart's model


@dataclass(frozen=True, slots=True)
class Calls:
    """Conversations of one kind, as the client process is told to play them."""

    client: str  # aiohttp | openai
    path: str  # chat | tokens
    turns: int
    concurrency: int
    new_tokens: int


Ask = Callable[[str, list[Any]], Awaitable[Any]]


def main() -> None:
    """Play the conversations; print latencies, wall and CPU time as JSON."""
    url, keys, calls = sys.argv[1:]
    json.dump(asyncio.run(_play(url, keys.split(","), Calls(**json.loads(calls)))), sys.stdout)


async def _play(url: str, keys: list[str], calls: Calls) -> tuple[list[float], float, float]:
    """Return the latency of every call, and wall and CPU time from the first to the last."""
    latencies_s, waiting = list[float](), iter(keys)

    async def agent(ask: Ask) -> None:
        for key in waiting:
            messages: list[Any] = [{"role": "user", "content": "12+34="}]
            for _ in range(calls.turns):
                began_s = time.perf_counter()
                said = await ask(key, messages)
                latencies_s.append(time.perf_counter() - began_s)
                messages += [said, {"role": "user", "content": "and?"}]

    make = {"aiohttp": _aiohttp, "openai": _openai}[calls.client]
    async with make(url, calls.path) as ask:
        began_s, cpu_s = time.perf_counter(), time.process_time()
        await asyncio.gather(*(agent(ask) for _ in range(calls.concurrency)))
        return latencies_s, time.perf_counter() - began_s, time.process_time() - cpu_s


@contextlib.asynccontextmanager
async def _aiohttp(url: str, path: str) -> AsyncGenerator[Ask]:
    async with aiohttp.ClientSession() as http:

        async def ask(key: str, messages: list[Any]) -> Any:  # noqa: ANN401
            if path == "chat":
                to, body = f"{url}/chat/completions", {"model": "policy", "messages": messages}
            else:
                to = f"{url.removesuffix('/v1')}/inference/v1/generate"
                body = {"token_ids": PROMPT, "sampling_params": {}}
            headers = {"Authorization": f"Bearer {key}"}
            async with http.post(to, json=body, headers=headers) as response:
                answer = json.loads(await response.read())
            return answer["choices"][0].get("message")

        yield ask


@contextlib.asynccontextmanager
async def _openai(url: str, _path: str) -> AsyncGenerator[Ask]:
    library = importlib.import_module("openai")
    async with library.AsyncOpenAI(base_url=url, api_key="none") as model:

        async def ask(key: str, messages: list[Any]) -> Any:  # noqa: ANN401
            answer = await model.chat.completions.create(
                model="policy",
                messages=messages,
                extra_headers={"Authorization": f"Bearer {key}"},
            )
            return answer.choices[0].message

        yield ask


if __name__ == "__main__":
    main()
