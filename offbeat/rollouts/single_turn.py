"""Rolls out a group with one model call, and scores it with one call."""

import time
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np

from offbeat.environments.protocol import EncodedPrompt, SingleTurn
from offbeat.environments.reward_value import NamedRewards
from offbeat.messages.failures import FailureKind, RolloutFailed
from offbeat.messages.generation import GenerateResult
from offbeat.messages.groups import Receipt, RewardsByName, RolloutTask
from offbeat.rollouts.calls import (
    EngineClient,
    Generate,
    check_answers,
    check_reward,
    check_rewards,
    environment_code,
    make_failure,
)
from offbeat.rollouts.columns import Columns, Rollout, pack_columns
from offbeat.rollouts.samples import Draw, SampleDraws, pack_samples, seed_of_turn, slice_result
from offbeat.rollouts.transcript import Transcript


class _Scores(NamedTuple):
    """Rewards of the samples of one answer."""

    rewards: list[float]
    by_name: RewardsByName = ()
    answers: tuple[str | None, ...] = ()  # None: not searched


async def run_single_turn(
    environment: SingleTurn, engine: EngineClient, draws: SampleDraws, prompt: EncodedPrompt
) -> tuple[Receipt, Columns]:
    """Run the group of a single-turn environment. Guarantees and errors are as in ``run_group``."""
    task = engine.task
    prompt_ids = prompt.token_ids
    engine = replace(engine, media=prompt.media) if prompt.media is not None else engine
    began = time.perf_counter()
    result = await engine.sample(task.request_prefix, prompt_ids, task.samples, task.seed)
    generated = time.perf_counter()
    try:
        scored = await _score(task, environment, result)
    except RolloutFailed as failure:
        if failure.sample is not None:
            failure.response_ids = slice_result(result, failure.sample).token_ids.tolist()
        if not draws.policy.spares_group(failure):
            raise
        generate_s = generated - began
        return await _score_one_by_one(environment, engine, draws, prompt_ids, (result, generate_s))
    rollout = Rollout(
        prompt_ids=prompt_ids,
        response_ids=result.token_ids.astype(np.int32, copy=False),
        logprobs=result.logprobs.astype(np.float32, copy=False),
        loss_mask=None,
        offsets=result.offsets.astype(np.int64, copy=False),
        version_spans=result.version_spans,
        finish_reasons=result.finish_reasons,
        engine_incarnation=result.incarnation,
        generate_s=generated - began,
        reward_s=time.perf_counter() - generated,
        kept_kv=result.kept_kv,
        answers=_answers(task, environment, result, scored),
        rewards_by_name=scored.by_name,
        media=prompt.media,
    )
    return pack_columns(task, rollout, scored.rewards)


async def _score_one_by_one(
    environment: SingleTurn,
    engine: EngineClient,
    draws: SampleDraws,
    prompt_ids: tuple[int, ...],
    first_tries: tuple[GenerateResult, float],
) -> tuple[Receipt, Columns]:
    """Score each sample separately to find samples whose reward fails, and draw these again.

    ``first_tries`` is the engine's answer for the whole group, with its duration.
    """
    one = msgspec.structs.replace(engine.task, samples=1)

    def make_draw(sample: int) -> Draw:
        async def draw(transcript: Transcript, retry: int, generate: Generate) -> None:
            whole, transcript.generate_s = first_tries
            result = slice_result(whole, sample)
            if retry:
                began = time.perf_counter()
                result = await replace(engine, generate=generate).sample(
                    f"{one.request_prefix}-{sample}-0",
                    prompt_ids,
                    samples=1,
                    seed=seed_of_turn(one.seed, sample, 0, retry),
                )
                transcript.generate_s = time.perf_counter() - began
            transcript.add_turn((), result)
            began = time.perf_counter()
            scored = await _score(one, environment, result)
            (transcript.reward,) = scored.rewards
            transcript.rewards_by_name = {name: value for name, (value,) in scored.by_name}
            transcript.reward_s = time.perf_counter() - began
            if answers := _answers(one, environment, result, scored):
                (transcript.answer,) = answers

        return draw

    drawn = await draws.draw_all(make_draw)
    return pack_samples(engine.task, prompt_ids, drawn, engine.media)


def _answers(
    task: RolloutTask, environment: SingleTurn, result: GenerateResult, scored: _Scores
) -> tuple[str, ...]:
    """Return the final answers of an evaluation's samples, or nothing for a training group."""
    if not task.evaluation:
        return ()
    if any(answer is not None for answer in scored.answers):
        named = ["" if answer is None else answer for answer in scored.answers]
        return check_answers(task, named, task.samples)
    with environment_code(task):
        answers = list(environment.answers(result))
    return check_answers(task, answers, task.samples) if answers else ()


async def _score(task: RolloutTask, environment: SingleTurn, result: GenerateResult) -> _Scores:
    with environment_code(task):
        values = list(await environment.score(task, result))
    if not any(issubclass(kind, NamedRewards) for kind in set(map(type, values))):
        return _Scores(check_rewards(task, values, task.samples))
    named = [each if isinstance(each, NamedRewards) else NamedRewards(each, {}) for each in values]
    rewards = check_rewards(task, [each.reward for each in named], task.samples)
    names = named[0].by_name.keys()
    if any(each.by_name.keys() != names for each in named):
        found = [sorted(each.by_name) for each in named]
        detail = f"samples have rewards by different names: {found}"
        raise make_failure(task, FailureKind.DATA, "reward_names_differ", detail)
    for sample, each in enumerate(named):
        for value in each.by_name.values():
            if value is not None:
                check_reward(task, value, sample)
    by_name = tuple((name, tuple(each.by_name[name] for each in named)) for name in names)
    return _Scores(rewards, by_name, tuple(each.answer for each in named))
