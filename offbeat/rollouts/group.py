"""Rolls out one prompt group, from a prompt to checked columns and their receipt. Needs no Ray."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from offbeat.environments.demonstrations import Demonstrations
from offbeat.environments.media_prompts import MediaEncoder, MediaError, find_media
from offbeat.environments.protocol import EncodedPrompt, Environment, MultiTurn, SingleTurn
from offbeat.messages.failures import FailureKind
from offbeat.messages.generation import SamplingParams
from offbeat.messages.groups import Receipt, RolloutTask
from offbeat.messages.media import media_bytes
from offbeat.models.media_rules import TEXT_ALONE, MediaTokens
from offbeat.rollouts.calls import (
    EngineClient,
    Generate,
    check_first_prompt,
    check_tokens,
    environment_code,
    make_failure,
)
from offbeat.rollouts.columns import Columns, Rollout, pack_columns
from offbeat.rollouts.multi_turn import run_multi_turn
from offbeat.rollouts.samples import SampleDraws, SampleFailurePolicy
from offbeat.rollouts.single_turn import run_single_turn

RECORDED: Final = "recorded"
"""Finish reason of a sample that comes from a row, not from an engine."""


def make_recorded_group(
    environment: Demonstrations, engine: EngineClient
) -> tuple[Receipt, Columns]:
    """Return the group of a row: one sample with reward 0.0 and without engine logprobs.

    A row has no weight version. Its tokens get the version that is served at dispatch. So the
    staleness of a step shows how many steps ahead its rows were read.

    Raises:
        RolloutFailed: Of kind DATA if the row cannot be encoded, is longer than ``max_model_len``,
            or has a token that represents a picture.
    """
    task, max_model_len = engine.task, engine.max_model_len
    with environment_code(task):
        made = environment.demonstrate(task.prompt)
    prompt_ids = check_tokens(task, made.prompt_ids, "the prompt")
    response = check_tokens(task, made.response_ids, "the completion")
    engine.check_text(prompt_ids, "the prompt")
    engine.check_text(response, "the completion")
    tokens = len(prompt_ids) + len(response)
    if tokens > max_model_len:
        row = f"row {task.prompt.row} of data.path, counted from 0"
        detail = f"{row}: {tokens} tokens do not fit generator.max_model_len={max_model_len}"
        raise make_failure(task, FailureKind.DATA, "row_too_long", detail)
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
    return pack_columns(task, rollout, [0.0])


@dataclass(frozen=True, slots=True)
class PromptMedia:
    """Encoder of prompts that name media, used instead of the environment, and its limits."""

    encoder: MediaEncoder | None = None  # None: the environment encodes every prompt
    max_bytes: int = 0  # reserved by the buffer in each group
    tokens: MediaTokens = TEXT_ALONE  # of the model; no text may hold them


NO_MEDIA: Final = PromptMedia()


async def run_group(
    task: RolloutTask,
    environment: Environment,
    generate: Generate,
    sampling: SamplingParams,
    *,
    max_turns: int,
    max_model_len: int,
    policy: SampleFailurePolicy,
    media: PromptMedia = NO_MEDIA,
) -> tuple[Receipt, Columns]:
    """Generate, reward and pack all samples of one prompt.

    The columns follow ``transfer_queue.schema`` and are checked. Cancelling cancels every open
    ``generate``. Errors of ``generate`` are raised unchanged.

    Args:
        task: Prompt, number of samples, and engine.
        environment: Environment of the worker. It must be started, and all groups share it.
        generate: Sends one request to the task's engine.
        sampling: Sampling parameters. Their ``seed`` is replaced by the task's seed.
        max_turns: Maximum model calls in one multi-turn episode.
        max_model_len: Maximum tokens of prompt and response together.
        policy: Decides whether a failed sample costs only the sample or its group.
        media: Encoder of the media of a prompt, and their limit.

    Raises:
        RolloutFailed: Of kind INFRASTRUCTURE if the engine aborted or its answer is malformed. Of
            kind DATA if the prompt does not fit, the environment failed or the columns violate the
            schema. If too few samples are valid, of the kind of their failures.
    """
    engine = EngineClient(task, generate, sampling, max_model_len, media_tokens=media.tokens)
    draws = SampleDraws.begin(task, policy, generate)
    match environment:
        case Demonstrations():
            return make_recorded_group(environment, engine)
        case SingleTurn():
            prompt = await _first_observation(engine, environment, media)
            return await run_single_turn(environment, engine, draws, prompt)
        case MultiTurn():
            prompt = await _first_observation(engine, environment, media)
            return await run_multi_turn(environment, engine, draws, prompt, max_turns)
        case _:
            raise TypeError(f"{type(environment).__name__} is neither SingleTurn nor MultiTurn")


async def _first_observation(
    engine: EngineClient, environment: Environment, media: PromptMedia
) -> EncodedPrompt:
    """Return the encoded prompt. If it names media, the model's processor encodes it.

    Raises:
        RolloutFailed: Of kind DATA, with the reason of a ``MediaError``, or because media have too
            many bytes; or raised by ``environment_code``, ``check_first_prompt`` or
            ``EngineClient.check_prompt``.
    """
    task = engine.task
    with environment_code(task):
        encoded: object = None
        if media.encoder is not None:
            try:
                encoded = await media.encoder.encode(task.prompt)
            except MediaError as error:
                detail = f"row {task.prompt.row}, counted from 0: {error}"
                raise make_failure(task, FailureKind.DATA, error.reason, detail) from error
        if encoded is None:
            encoded = environment.encode(task.prompt)
    prompt = check_first_prompt(task, encoded)
    if (nbytes := media_bytes(prompt.media)) > media.max_bytes:
        detail = f"its media have {nbytes} bytes; {find_media().LIMIT_KEY} allows {media.max_bytes}"
        raise make_failure(task, FailureKind.DATA, media.tokens.unusable_reason, detail)
    engine.check_prompt(prompt)
    return prompt
