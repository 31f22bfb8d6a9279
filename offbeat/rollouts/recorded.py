"""Makes a group of a recorded sample: what a row of a file says, instead of what an engine drew."""

from typing import Final

import numpy as np

from offbeat.environments.demonstrations import Demonstrations
from offbeat.messages.failures import FailureKind
from offbeat.messages.groups import Receipt
from offbeat.rollouts.calls import EngineClient, checked_tokens, environment_code, failed
from offbeat.rollouts.columns import Columns, Rollout, packed

RECORDED: Final = "recorded"
"""Finish reason of a sample that no engine has drawn."""


def recorded_group(environment: Demonstrations, engine: EngineClient) -> tuple[Receipt, Columns]:
    """Return the group of a row: one sample, without logprobs of an engine; its reward is 0.0.

    A row has no weight version. Its tokens bear that of the dispatch, so the staleness of a step
    says how many steps ahead its rows were read.

    Raises:
        RolloutFailed: DATA when the row cannot be encoded, is longer than ``max_model_len``, or has
            a token that represents a picture.
    """
    task, max_model_len = engine.task, engine.max_model_len
    with environment_code(task):
        made = environment.demonstrate(task.prompt)
    prompt_ids = checked_tokens(task, made.prompt_ids, "the prompt")
    response = checked_tokens(task, made.response_ids, "the completion")
    engine.check_text(prompt_ids, "the prompt")
    engine.check_text(response, "the completion")
    tokens = len(prompt_ids) + len(response)
    if tokens > max_model_len:
        row = f"row {task.prompt.row} of data.path, counted from 0"
        detail = f"{row}: {tokens} tokens do not fit generator.max_model_len={max_model_len}"
        raise failed(task, FailureKind.DATA, "row_too_long", detail)
    rollout = Rollout(
        prompt_ids=prompt_ids,
        response_ids=np.array(response, dtype=np.int32),
        logprobs=None,
        loss_mask=np.array(made.loss_mask, dtype=np.bool_),
        offsets=np.array([0, len(response)], dtype=np.int64),
        version_spans=(((task.version, len(response)),),),
        finish_reasons=(RECORDED,),
        engine_incarnation=task.engine,
        generate_s=0.0,
        reward_s=0.0,
    )
    return packed(task, rollout, [0.0])
