"""Environment with several reward functions: the reward of a sample is their weighted sum."""

import asyncio
import math
from collections.abc import Mapping, Sequence

from offbeat.environments.function_reward import FunctionReward
from offbeat.environments.protocol import EncodedPrompt, SingleTurn
from offbeat.environments.reward_value import NamedRewards
from offbeat.messages.failures import FailureKind, RolloutFailed
from offbeat.messages.generation import GenerateResult
from offbeat.messages.groups import Prompt, RolloutTask


class WeightedRewards(SingleTurn):
    """Scores responses with several functions at once, each in processes of its own.

    A function that fails fails the samples as a single one does: there is no sum without it. One that
    returns None does not apply to the sample, and is no part of its sum.
    """

    def __init__(self, functions: Mapping[str, tuple[float, FunctionReward]]) -> None:
        """``functions`` are weights and functions by name; there is at least one."""
        self._functions = dict(functions)

    @property
    def reward_calls(self) -> int:
        return sum(function.reward_calls for _, function in self._functions.values())

    async def start(self) -> None:
        for _, function in self._functions.values():
            await function.start()

    async def close(self) -> None:
        for _, function in self._functions.values():
            await function.close()

    def encode(self, prompt: Prompt) -> tuple[int, ...] | EncodedPrompt:
        _, first = next(iter(self._functions.values()))
        return first.encode(prompt)

    async def score(self, task: RolloutTask, result: GenerateResult) -> Sequence[NamedRewards]:
        try:
            async with asyncio.TaskGroup() as scoring:
                running = {
                    name: scoring.create_task(_scored(name, function, task, result))
                    for name, (_, function) in self._functions.items()
                }
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        values = {name: each.result() for name, each in running.items()}
        return [
            self._sum(task, sample, {name: each[sample] for name, each in values.items()})
            for sample in range(task.samples)
        ]

    def _sum(
        self, task: RolloutTask, sample: int, values: Mapping[str, NamedRewards | None]
    ) -> NamedRewards:
        """Return the weighted sum of one sample, and the answer that one of the functions names.

        Functions that do not apply to the sample are left out.

        Raises:
            RolloutFailed: ``answer_named_twice``; ``reward_none``: no function applies.
        """
        scored = {name: each for name, each in values.items() if each is not None}
        named = [name for name, each in scored.items() if each.answer is not None]
        if len(named) > 1:
            detail = f"rewards {', '.join(named)} each name the answer of a sample; let one do so"
            raise RolloutFailed(
                FailureKind.DATA, task.prompt_index, task.attempt, "answer_named_twice", detail
            )
        weighted = [self._functions[name][0] * each.reward for name, each in scored.items()]
        if not weighted:
            detail = f"{', '.join(values)} all return None: no reward applies to the sample"
            raise RolloutFailed(
                FailureKind.DATA,
                task.prompt_index,
                task.attempt,
                "reward_none",
                detail,
                sample=sample,
            )
        by_name = {name: each and each.reward for name, each in values.items()}
        answer = scored[named[0]].answer if named else None
        return NamedRewards(math.fsum(weighted), by_name, answer)


async def _scored(
    name: str, function: FunctionReward, task: RolloutTask, result: GenerateResult
) -> Sequence[NamedRewards | None]:
    try:
        return await function.score_where_it_applies(task, result)
    except RolloutFailed as error:
        error.detail = f"{error.detail} (reward {name})"
        raise
