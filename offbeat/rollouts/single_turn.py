"""Rolls out a group with one model call, and scores it with one call."""

import time

import numpy as np

from offbeat.environments.protocol import SingleTurn
from offbeat.messages.groups import Receipt, RolloutTask
from offbeat.rollouts.calls import (
    EngineClient,
    checked_rewards,
    checked_tokens,
    environment_code,
)
from offbeat.rollouts.columns import Columns, Rollout, packed


async def run_single_turn(
    task: RolloutTask, environment: SingleTurn, engine: EngineClient
) -> tuple[Receipt, Columns]:
    """The group of a single-turn environment; promises and errors are those of ``run_group``."""
    with environment_code(task):
        encoded = environment.encode(task.prompt)
    prompt_ids = checked_tokens(task, encoded, "the prompt")
    began = time.perf_counter()
    result = await engine.ask(task.request_prefix, prompt_ids, task.samples, task.seed)
    generated = time.perf_counter()
    with environment_code(task):
        values = list(await environment.score(task, result))
    rewards = checked_rewards(task, values, task.samples)
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
    )
    return packed(task, rollout, rewards)
