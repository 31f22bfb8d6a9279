"""A taskset of verifiers, and a harness that asks the model in this process."""
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedBaseClass=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportUntypedClassDecorator=false

import json
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["SumHarness", "SumTaskset"]

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {}, "b": {}}},
    },
}


class SumData(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=0.5)
    async def right(self, trace: Any) -> float:
        if self.data.answer == "broken":
            raise ValueError("no such answer")
        return float(self.data.answer in str(trace.last_reply))

    @vf.metric
    async def answers(self, trace: Any) -> float:
        return float(len(trace.assistant_messages))


class SumTaskset(vf.Taskset[SumTask]):
    def load(self) -> Iterator[SumTask]:
        for a, b in ((2, 3), (4, 4), (1, 0)):
            yield SumTask(SumData(prompt=f"{a}+{b}?", answer=str(a + b)), self.config.task)


class SumHarnessConfig(vf.HarnessConfig):
    edits_history: bool = False


class SumHarness(vf.Harness[SumHarnessConfig]):
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
        del trace, runtime, mcp_urls, tool_interception_url
        _, prompt = self.resolve_text_prompt(data)
        messages: list[Any] = [{"role": "user", "content": prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as model:
            for _ in range(4):
                answer = await model.chat.completions.create(
                    model=ctx.model, messages=messages, tools=[ADD]
                )
                said = answer.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                if self.config.edits_history:
                    messages[-1]["content"] = "something else"
                for call in said.tool_calls or ():
                    assert call.type == "function"
                    numbers = json.loads(call.function.arguments)
                    result = str(numbers["a"] + numbers["b"])
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
                if not said.tool_calls:
                    break
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
