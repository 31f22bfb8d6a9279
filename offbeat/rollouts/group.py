"""Rolls out one prompt group: prompt in, checked columns and their receipt out. No Ray."""

from dataclasses import dataclass
from typing import Final

from offbeat.config.sections.environment import MEDIA_LIMIT
from offbeat.environments.demonstrations import Demonstrations
from offbeat.environments.media_prompts import MediaEncoder, MediaError
from offbeat.environments.protocol import EncodedPrompt, Environment, MultiTurn, SingleTurn
from offbeat.messages.failures import FailureKind
from offbeat.messages.generation import SamplingParams
from offbeat.messages.groups import Receipt, RolloutTask
from offbeat.messages.media import media_bytes
from offbeat.multimodal.prompt_tokens import TEXT_ALONE, MediaTokens
from offbeat.rollouts.calls import (
    EngineClient,
    Generate,
    checked_prompt,
    environment_code,
    failed,
)
from offbeat.rollouts.columns import Columns
from offbeat.rollouts.multi_turn import run_multi_turn
from offbeat.rollouts.recorded import recorded_group
from offbeat.rollouts.samples import SampleDraws, SampleFailurePolicy
from offbeat.rollouts.single_turn import run_single_turn


@dataclass(frozen=True, slots=True)
class PromptMedia:
    """Encoder of the prompts that name media, in the place of the environment, and its limit."""

    encoder: MediaEncoder | None = None  # None: the environment encodes every prompt
    max_bytes: int = 0  # for which the buffer keeps room in each group
    tokens: MediaTokens = TEXT_ALONE  # of the model, which no text may hold


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

    The columns are those of ``transfer_queue.schema``, checked. Cancelling cancels every open
    ``generate``. Errors of ``generate`` are raised unchanged.

    Args:
        task: Prompt, number of samples, and engine.
        environment: Started, shared by all groups of the worker.
        generate: Sends one request to the task's engine.
        sampling: ``seed`` is replaced by the task's own.
        max_turns: Model calls in one multi-turn episode at most.
        max_model_len: Longest prompt plus response, in tokens.
        policy: What a failed sample costs.
        media: Encoder of the media of a prompt, and their limit.

    Raises:
        RolloutFailed: INFRASTRUCTURE when the engine aborted or answered out of shape; DATA when
            the prompt does not fit, the environment failed or the columns break the schema; of the
            kind of its samples' failures when too few of them are valid.
    """
    engine = EngineClient(task, generate, sampling, max_model_len, media_tokens=media.tokens)
    draws = SampleDraws.begin(task, policy, generate)
    match environment:
        case Demonstrations():
            return recorded_group(environment, engine)
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
    """Return the encoded prompt: by the model's processor if it names media.

    Raises:
        RolloutFailed: DATA, of the reason of a ``MediaError``, or because media have too many bytes;
            as ``environment_code``, ``checked_prompt`` and ``EngineClient.check_prompt``.
    """
    task = engine.task
    with environment_code(task):
        encoded: object = None
        if media.encoder is not None:
            try:
                encoded = await media.encoder.encode(task.prompt)
            except MediaError as error:
                detail = f"row {task.prompt.row}, counted from 0: {error}"
                raise failed(task, FailureKind.DATA, error.reason, detail) from error
        if encoded is None:
            encoded = environment.encode(task.prompt)
    prompt = checked_prompt(task, encoded)
    if (nbytes := media_bytes(prompt.media)) > media.max_bytes:
        detail = f"its media have {nbytes} bytes; {MEDIA_LIMIT} allows {media.max_bytes}"
        raise failed(task, FailureKind.DATA, media.tokens.unusable_reason, detail)
    engine.check_prompt(prompt)
    return prompt
