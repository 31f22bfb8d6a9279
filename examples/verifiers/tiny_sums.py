"""A taskset of verifiers and its harness: the sums of the quickstart, one turn each.

A real taskset is a package, and its harness an agent in a program of its own. This one is small
enough to be read: data, a reward, and a loop that asks the model with OpenAI's client.
"""
# verifiers and openai come with the extra verifiers; types are checked without them as well.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedBaseClass=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportUntypedClassDecorator=false
# ruff: noqa: ANN401 -- the types are the library's

import random
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["OneTurn", "TinySums"]

_TASKS = 400


class SumData(vf.TaskData):
    """Fields of a task besides its prompt."""

    answer: str = ""


class SumTask(vf.Task[SumData]):
    """One sum."""

    @vf.reward
    async def right(self, trace: Any) -> float:
        """Return 1.0 for the right number, less the further off its end is."""
        said = str(trace.last_reply).strip()
        if not (said.isascii() and said.isdecimal() and len(said) < 5):
            return 0.0
        return 1.0 if said == self.data.answer else 0.2 * (said[-1] == self.data.answer[-1])


class TinySums(vf.Taskset[SumTask]):
    """The first sums of two numbers below 20, in an order that a seed gives."""

    def load(self) -> Iterator[SumTask]:
        """Yield the tasks; the same ones whenever it is called."""
        dice = random.Random(0)
        for _ in range(_TASKS):
            a, b = dice.randrange(20), dice.randrange(20)
            yield SumTask(SumData(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task)


class OneTurn(vf.Harness[vf.HarnessConfig]):
    """Asks the model once, in the process of the episode."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        """Play one episode."""
        del trace, runtime, mcp_urls, tool_interception_url
        _, prompt = self.resolve_text_prompt(data)
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as model:
            messages: list[Any] = [{"role": "user", "content": prompt}]
            await model.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
