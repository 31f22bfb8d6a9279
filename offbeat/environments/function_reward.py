"""Environments with Python functions as rewards: one function, or the weighted sum of several.

``reward(prompt: dict, response: str, **options) -> float``
``reward(prompt: dict, response: str, **options) -> {"reward": float, "answer": str}``

``prompt`` is the row of the data file. ``response`` is the text of the trained tokens. It keeps
special tokens except the end token. If the prompt has opened a thinking block, graders of this
package get the response with the opening tag. ``answer`` is the response's final answer, for maj@k
in evaluations. If the function is async, the samples of a group are scored concurrently. The
function runs in child processes (``killable``), so that a failure costs at most one group.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Final

from offbeat.environments.final_answer import find_open_thought
from offbeat.environments.frames import RewardTarget
from offbeat.environments.killable import ChildPool, RewardFailed
from offbeat.environments.media_prompts import find_media
from offbeat.environments.protocol import EncodedPrompt, SingleTurn
from offbeat.environments.reward_value import NamedRewards
from offbeat.environments.text import Tokenizer, begun_answer, content_ids, encode_prompt
from offbeat.messages.failures import FailureKind, RolloutFailed
from offbeat.messages.generation import GenerateResult
from offbeat.messages.groups import Prompt, RolloutTask

_LAST_TOKENS: Final = 16
"""Tokens at the end of a prompt that are searched for an opened thinking block."""


class FunctionReward(SingleTurn):
    """Scores responses with a user's function.

    ``score`` raises ``RolloutFailed`` with one of the reasons ``reward_raised``, ``reward_none``,
    ``reward_wrong_type``, ``reward_not_finite``, ``reward_deadline``, ``reward_process_died``,
    ``reward_answered_twice``. All of these have the kind DATA. ``reward_import_failed`` has the
    kind BUG, because no retry can fix it. At ``start`` it is raised as ``RewardFailed``. An async
    function raises ``EnvironmentUnavailable`` if its service stayed unavailable.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        target: RewardTarget,
        workers: int,
        *,
        is_counted: bool = True,
        ignores_thinking: bool = False,
    ) -> None:
        """Store the settings. ``start`` starts the processes.

        Args:
            tokenizer: The model's tokenizer.
            target: The function.
            workers: Processes that run it.
            is_counted: Whether its calls count in ``rollout.reward_call_budget``.
            ignores_thinking: Whether the function scores only text outside thinking blocks. A
                response that begins inside a block is then passed with the opening tag.
        """
        self._tokenizer, self._is_counted = tokenizer, is_counted
        self._ignores_thinking = ignores_thinking
        self._pool = ChildPool(target, workers)

    @property
    def reward_calls(self) -> int:
        return self._pool.calls_begun if self._is_counted else 0

    async def start(self) -> None:
        await self._pool.start()

    async def close(self) -> None:
        await self._pool.close()

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        return encode_prompt(prompt, self._tokenizer)

    async def score(self, task: RolloutTask, result: GenerateResult) -> Sequence[NamedRewards]:
        scored = await self.score_where_it_applies(task, result)
        return [each for each in scored if each is not None]

    async def score_where_it_applies(
        self, task: RolloutTask, result: GenerateResult
    ) -> Sequence[NamedRewards | None]:
        """Score like ``score``, but return None for samples that the function does not apply to."""
        opening = self._opening(task.prompt) if self._ignores_thinking else ""
        responses = [opening + self._tokenizer.decode(ids) for ids in content_ids(result)]
        try:
            row = find_media().without_content(task.prompt.data)
            return await self._pool.call(row, responses)
        except RewardFailed as error:
            raise error.fail(task) from error

    def _opening(self, prompt: Prompt) -> str:
        """Return the text at the end of the prompt that belongs to the answer.

        This is the last message if the assistant began the answer there, or the opening tag of the
        thinking block in which responses begin.
        """
        if opening := begun_answer(prompt.data):
            return opening
        try:
            last = self.encode(prompt)[-_LAST_TOKENS:]
        except ValueError:  # a tokenizer without a template: prompts with media have a processor's
            return ""
        return find_open_thought(self._tokenizer.decode(last))


class WeightedRewards(SingleTurn):
    """Scores responses with several functions at once, each in separate processes.

    If one function fails, the samples fail as with a single function, because the sum would be
    incomplete. If a function returns None, it does not apply to the sample and is left out of the
    sum.
    """

    def __init__(self, functions: Mapping[str, tuple[float, FunctionReward]]) -> None:
        """Create the environment. ``functions`` has the weight and the function of each name."""
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
                    name: scoring.create_task(_score(name, function, task, result))
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
        """Return the weighted sum for one sample, and the answer that a function returned.

        Functions that do not apply to the sample are left out.

        Raises:
            RolloutFailed: ``answer_named_twice`` if two functions return an answer, or
                ``reward_none`` if no function applies.
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


async def _score(
    name: str, function: FunctionReward, task: RolloutTask, result: GenerateResult
) -> Sequence[NamedRewards | None]:
    try:
        return await function.score_where_it_applies(task, result)
    except RolloutFailed as error:
        error.detail = f"{error.detail} (reward {name})"
        raise
