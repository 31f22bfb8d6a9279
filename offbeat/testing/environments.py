"""Proves an environment with groups of invented answers: no model, no engine.

Also creates results of requests without a model, for proofs of environments, tests and benchmarks.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np

from offbeat.environments.protocol import Environment
from offbeat.environments.text import Tokenizer
from offbeat.messages.failures import FixableError, RolloutFailed
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams
from offbeat.messages.groups import Prompt, RolloutTask
from offbeat.rollouts.group import run_group
from offbeat.rollouts.samples import SampleFailurePolicy
from offbeat.testing.algorithms import find_name


def make_result(
    request_id: str,
    samples: Sequence[Sequence[int]],
    **facts: Any,  # noqa: ANN401 -- fields of a result
) -> GenerateResult:
    """Return a consistent result: the token ids of each sample, packed end to end.

    All tokens have the same logprob and version 0, unless ``facts`` has other values.
    """
    ids = [token for sample in samples for token in sample]
    usual: dict[str, Any] = {
        "logprobs": np.full(len(ids), -0.5, np.float32),
        "finish_reasons": ("stop",) * len(samples),
        "version_spans": tuple(((0, len(sample)),) for sample in samples),
        "engine": "engine-0",
        "incarnation": "engine-0-a",
    }
    return GenerateResult(
        request_id=request_id,
        token_ids=np.array(ids, np.int32),
        offsets=np.array([0, *accumulate(map(len, samples))], np.int64),
        **(usual | facts),
    )


ANSWERS: Final = ("", "0", "42", "The answer is 42.", "\n\n", '}{"', "ä漢🙂")
"""Answers of an untrained model."""


class EnvironmentRefused(FixableError):
    """An environment whose groups would fail, or whose rewards are not a function of the answer.

    Fix: correct the environment as the message says.
    """

    form = "{}: {}. {}"


def prove_environment(
    make: Callable[[Tokenizer], Environment],
    tokenizer: Tokenizer,
    rows: Sequence[Mapping[str, Any]],
    *,
    answers: Sequence[str] = ANSWERS,
    max_turns: int = 4,
    max_model_len: int = 4096,
) -> None:
    """Prove that an environment scores every answer, and always gives it the same score.

    Each row is rolled out with all ``answers`` as one group, by the code of a run. Then this is
    repeated with the answers in the opposite order, and all rows at once.

    Args:
        make: Returns the environment of one worker, not started.
        tokenizer: Tokenizer of the model to be trained.
        rows: Rows of some prompts.
        answers: Texts of the model, one per sample.
        max_turns: Turns of a ``MultiTurn``; the answer is the same in each.
        max_model_len: Longest sample [tokens].

    Raises:
        EnvironmentRefused: A group fails, or an answer gets two rewards.
    """
    subject = find_name(make)

    async def prove() -> None:
        environment = make(tokenizer)
        await environment.start()
        try:
            alone = [
                await compute_rewards(environment, place, answers) for place in range(len(rows))
            ]
            turned = [
                (await compute_rewards(environment, place, answers[::-1]))[::-1]
                for place in range(len(rows))
            ]
            together = await asyncio.gather(
                *(compute_rewards(environment, place, answers) for place in range(len(rows)))
            )
        finally:
            await environment.close()
        for how, others in (
            ("with the samples in the opposite order", turned),
            ("with other groups at the same time", together),
        ):
            _compare(subject, answers, alone, others, how)

    async def compute_rewards(
        environment: Environment, place: int, texts: Sequence[str]
    ) -> tuple[float, ...]:
        prompt = Prompt(place, 0, place, dict(rows[place]))
        task = RolloutTask(prompt, 1, len(texts), "engine-0", place, 60.0)
        sampling = SamplingParams(max_new_tokens=max_model_len // 2)
        try:
            receipt, _ = await run_group(
                task,
                environment,
                _answering(tokenizer, texts, task.request_prefix),
                sampling,
                max_turns=max_turns,
                max_model_len=max_model_len,
                policy=SampleFailurePolicy(),
            )
        except RolloutFailed as failure:
            problem = f"the group of row {place} fails: {failure}"
            raise EnvironmentRefused(subject, problem, _FAILS_FIX) from failure
        return receipt.rewards

    asyncio.run(prove())


_FAILS_FIX: Final = (
    "Let encode return tokens for each row, and score one finite number for each answer"
)
_TWICE_FIX: Final = (
    "Let a reward depend only on its prompt and answer, and keep no state between groups"
)


def _compare(
    subject: str,
    answers: Sequence[str],
    rewards: Sequence[Sequence[float]],
    others: Sequence[Sequence[float]],
    how: str,
) -> None:
    for row, (first, second) in enumerate(zip(rewards, others, strict=True)):
        for answer, one, other in zip(answers, first, second, strict=True):
            if not math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9):
                problem = f"in row {row} the answer {answer!r} gets {one:g}, and {other:g} {how}"
                raise EnvironmentRefused(subject, problem, _TWICE_FIX)


def _answering(
    tokenizer: Tokenizer, texts: Sequence[str], of_group: str
) -> Callable[[GenerateRequest], Awaitable[GenerateResult]]:
    """Return an engine that answers groups with these texts, and single samples with their text."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = [[*tokenizer.encode(text, add_special_tokens=False), *end] or [0] for text in texts]

    async def generate(request: GenerateRequest) -> GenerateResult:
        sample = request.request_id.removeprefix(of_group).lstrip("-").split("-")[0]
        samples = [ids[int(sample)]] if sample else ids
        return make_result(request.request_id, samples)

    return generate
