"""Rolls out one prompt group: prompt in, checked columns and their receipt out. No Ray."""

from dataclasses import dataclass
from typing import Final

from offbeat.environments.demonstrations import Demonstrations
from offbeat.environments.picture_encoder import PictureEncoder, media_bytes
from offbeat.environments.picture_errors import BadPicture, StrayPlaceholder, WrongPlaces
from offbeat.environments.protocol import EncodedPrompt, Environment, MultiTurn, SingleTurn
from offbeat.messages.failures import FailureKind
from offbeat.messages.generation import SamplingParams
from offbeat.messages.groups import Receipt, RolloutTask
from offbeat.multimodal.picture_tokens import TEXT_ALONE, PictureTokens
from offbeat.rollouts.calls import (
    PICTURE_TOKEN,
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
class PromptPictures:
    """Encoder of the prompts that name pictures, in the place of the environment, and its limit."""

    encoder: PictureEncoder | None = None  # None: the environment encodes every prompt
    max_bytes: int = 0  # for which the buffer keeps room in each group
    tokens: PictureTokens = TEXT_ALONE  # of the model, which no text may hold


NO_PICTURES: Final = PromptPictures()


async def run_group(
    task: RolloutTask,
    environment: Environment,
    generate: Generate,
    sampling: SamplingParams,
    *,
    max_turns: int,
    max_model_len: int,
    policy: SampleFailurePolicy,
    pictures: PromptPictures = NO_PICTURES,
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
        pictures: What encodes the pictures of a prompt, and how large they may be.

    Raises:
        RolloutFailed: INFRASTRUCTURE when the engine aborted or answered out of shape; DATA when
            the prompt does not fit, the environment failed or the columns break the schema; of the
            kind of its samples' failures when too few of them are valid.
    """
    engine = EngineClient(task, generate, sampling, max_model_len, picture_tokens=pictures.tokens)
    draws = SampleDraws.begin(task, policy, generate)
    match environment:
        case Demonstrations():
            return recorded_group(environment, engine)
        case SingleTurn():
            prompt = await _first_observation(engine, environment, pictures)
            return await run_single_turn(environment, engine, draws, prompt)
        case MultiTurn():
            prompt = await _first_observation(engine, environment, pictures)
            return await run_multi_turn(environment, engine, draws, prompt, max_turns)
        case _:
            raise TypeError(f"{type(environment).__name__} is neither SingleTurn nor MultiTurn")


async def _first_observation(
    engine: EngineClient, environment: Environment, pictures: PromptPictures
) -> EncodedPrompt:
    """Return the encoded prompt: by the model's processor where it names pictures.

    Raises:
        RolloutFailed: DATA, ``picture_unusable``: a picture cannot be read, decoded or placed, or
            all take too many bytes; ``picture_token``: a text has a token that represents a
            picture; as ``environment_code`` and ``checked_prompt``.
    """
    task = engine.task
    with environment_code(task):
        encoded: object = None
        if pictures.encoder is not None:
            try:
                encoded = await pictures.encoder.encode(task.prompt)
            except (BadPicture, WrongPlaces) as error:
                raise failed(task, FailureKind.DATA, "picture_unusable", str(error)) from error
            except StrayPlaceholder as error:
                detail = f"row {task.prompt.row}, counted from 0: {error}"
                raise failed(task, FailureKind.DATA, PICTURE_TOKEN, detail) from error
        if encoded is None:
            encoded = environment.encode(task.prompt)
    prompt = checked_prompt(task, encoded)
    nbytes = 0 if prompt.media is None else media_bytes(prompt.media)
    if nbytes > (most := pictures.max_bytes):
        detail = f"its pictures take {nbytes} bytes; environment.images has room for {most}"
        raise failed(task, FailureKind.DATA, "picture_unusable", detail)
    engine.check_prompt(prompt)
    return prompt
