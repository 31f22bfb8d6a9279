"""Calls of a rollout to its engine and its environment, with typed failures."""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from operator import sub
from typing import Final, TypeGuard, cast

import msgspec
import numpy as np
import structlog

from offbeat.config.user_code import describe
from offbeat.environments.media_prompts import find_media
from offbeat.environments.protocol import EncodedPrompt, EnvironmentUnavailable
from offbeat.environments.reward_value import BadReward, are_rewards, parse_reward, short_answer
from offbeat.messages.failures import (
    ENVIRONMENT_UNAVAILABLE,
    Component,
    FailureKind,
    RolloutFailed,
    SchemaError,
    StrayMediaToken,
)
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams
from offbeat.messages.groups import RolloutTask, VersionSpans
from offbeat.messages.media import Media
from offbeat.messages.redaction import cut_head
from offbeat.models.media_rules import TEXT_ALONE, MediaTokens
from offbeat.transfer_queue.schema import check_medium

Generate = Callable[[GenerateRequest], Awaitable[GenerateResult]]


class UniqueRequests:
    """Sends requests to an engine under ids that are never reused.

    Prompt index and attempt are not enough. If a controller's last records were lost, its successor
    sends the same attempt again to another worker, while the engine still decodes the first
    request.
    """

    def __init__(self, sender: str) -> None:
        """Create the sender.

        ``sender`` identifies this process among all earlier and later processes.
        """
        self._sender, self._numbers = sender, count()

    async def send(self, generate: Generate, request: GenerateRequest) -> GenerateResult:
        """Send the request under a unique id and return the result of ``generate``."""
        unique = f"{self._sender}.{next(self._numbers)}.{request.request_id}"
        return await generate(msgspec.structs.replace(request, request_id=unique))


_WRONG_TYPE: Final = "environment_wrong_type"
_LARGEST_TOKEN: Final = 2**31 - 1  # stored as int32

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EngineClient:
    """Client of one task's engine: sends requests that fit into its window, and checks replies."""

    task: RolloutTask
    generate: Generate
    sampling: SamplingParams
    max_model_len: int  # prompt plus response, in tokens
    media: Media | None = None  # of the prompt, sent with every request
    media_tokens: MediaTokens = TEXT_ALONE  # that no text may hold

    def room(self, tokens: int) -> int:
        """Return the number of tokens that still fit after a history of ``tokens``."""
        return self.max_model_len - tokens

    def check_room(self, history: tuple[int, ...]) -> None:
        """Check that a response fits after ``history``.

        Raises:
            RolloutFailed: ``prompt_empty``, ``prompt_too_long``.
        """
        if not history:
            raise make_failure(
                self.task, FailureKind.DATA, "prompt_empty", "the prompt has no tokens"
            )
        if self.room(len(history)) < 1:
            detail = f"{len(history)} tokens leave no room in max_model_len={self.max_model_len}"
            raise make_failure(self.task, FailureKind.DATA, "prompt_too_long", detail)

    def check_text(self, token_ids: Sequence[int], what: str) -> None:
        """Check that a text without sampled tokens has no token that represents media.

        Raises:
            StrayMediaToken: The text has such a token.
        """
        if problem := self.media_tokens.problem_of_text(token_ids):
            raise self._stray_token(what, problem)

    def check_prompt(self, prompt: EncodedPrompt) -> None:
        """Check a first observation against the media that the model reads.

        Raises:
            StrayMediaToken: The observation is a text with a token that represents media.
            RolloutFailed: Its placeholders do not match its media, or the model reads different
                media.
        """
        problem = self.media_tokens.problem_of_prompt(prompt.token_ids, prompt.media)
        if problem and prompt.media is None:
            raise self._stray_token("the prompt", problem)
        if problem:
            detail = _of_row(self.task, "the prompt", problem)
            raise make_failure(
                self.task, FailureKind.DATA, self.media_tokens.unusable_reason, detail
            )

    def _stray_token(self, what: str, problem: str) -> StrayMediaToken:
        task, reason = self.task, self.media_tokens.stray_reason
        detail = _of_row(task, what, problem)
        return StrayMediaToken(FailureKind.DATA, task.prompt_index, task.attempt, reason, detail)

    async def sample(
        self, request_id: str, history: tuple[int, ...], samples: int, seed: int
    ) -> GenerateResult:
        """Continue ``history`` ``samples`` times, each with at least one token.

        Raises:
            RolloutFailed: ``prompt_empty``, ``prompt_too_long``, ``generation_aborted``,
                ``engine_answer`` (samples, offsets or version spans do not add up),
                ``empty_response``.
        """
        self.check_room(history)
        task, room = self.task, self.room(len(history))
        sampling = msgspec.structs.replace(
            self.sampling, seed=seed, max_new_tokens=min(room, self.sampling.max_new_tokens)
        )
        request = GenerateRequest(request_id, history, samples, sampling, self.media)
        result = await self.generate(request)
        _check_answer(task, result, samples)
        return result


def _of_row(task: RolloutTask, what: str, problem: str) -> str:
    of_set = f" of set {task.eval_set}" if task.eval_set else ""
    return f"row {task.prompt.row}{of_set}, counted from 0: {what} {problem}"


def make_failure(
    task: RolloutTask, kind: FailureKind, reason: str, detail: str, sample: int | None = None
) -> RolloutFailed:
    """Create the error for this group and attempt."""
    return RolloutFailed(kind, task.prompt_index, task.attempt, reason, detail, sample=sample)


@contextmanager
def environment_code(task: RolloutTask) -> Generator[None]:
    """Turn any exception of an environment into a failure of the group, and log it.

    This is the worker's only broad ``except``, because environments are other people's code.
    """
    try:
        yield
    except RolloutFailed:
        raise
    except asyncio.CancelledError as error:
        running = asyncio.current_task()
        if running is None or running.cancelling():
            raise
        # The task was not cancelled. A call inside the environment was cancelled and let the
        # exception through.
        raise make_failure(task, FailureKind.DATA, "environment_raised", describe(error)) from error
    except EnvironmentUnavailable as error:
        raise RolloutFailed(
            FailureKind.INFRASTRUCTURE,
            task.prompt_index,
            task.attempt,
            ENVIRONMENT_UNAVAILABLE,
            describe(error),
            Component.ENVIRONMENT,
        ) from error
    except GeneratorExit:  # raised in a coroutine that is closed
        raise
    except BaseException as error:  # SystemExit, too: it would end the event loop of the worker
        log.warning(
            "environment.raised",
            prompt_index=task.prompt_index,
            attempt=task.attempt,
            exc_info=True,
        )
        raise make_failure(task, FailureKind.DATA, "environment_raised", describe(error)) from error


def check_first_prompt(task: RolloutTask, values: object) -> EncodedPrompt:
    """Return a first observation, with its media checked as their plug-in declares them.

    Raises:
        RolloutFailed: ``environment_wrong_type``, as in ``check_tokens`` or if the media are not a
            mapping; ``schema`` if the arrays do not fit each other.
    """
    if not isinstance(values, EncodedPrompt):
        return EncodedPrompt(check_tokens(task, values, "the prompt"))
    media = values.media
    if not isinstance(cast("object", media), Mapping | None):
        detail = f"the media are {type(media).__name__}; return a mapping of arrays"
        raise make_failure(task, FailureKind.DATA, _WRONG_TYPE, detail)
    if media is not None:
        try:
            for name, array in media.items():
                check_medium(name, array)
            find_media().check(media)
        except SchemaError as error:  # an engine that computes with them might crash
            raise make_failure(task, FailureKind.DATA, "schema", str(error)) from error
    return EncodedPrompt(check_tokens(task, values.token_ids, "the prompt"), media)


def check_tokens(task: RolloutTask, values: object, what: str) -> tuple[int, ...]:
    """Return an observation as token ids.

    Raises:
        RolloutFailed: ``environment_wrong_type`` if the values are not integers, or out of range
            for a token.
    """
    kind: type[object] = type(values)
    if kind is tuple and _are_token_ids(cast("tuple[object, ...]", values)):
        return cast("tuple[int, ...]", values)
    try:
        ids = np.asarray(values)
    except (ValueError, OverflowError) as error:  # ragged, or beyond 64 bits
        raise make_failure(task, FailureKind.DATA, _WRONG_TYPE, f"{what}: {error}") from error
    if ids.shape == (0,):
        return ()
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        got = f"{type(values).__name__} {cut_head(repr(values), 80)}"
        detail = f"{what} is {got}; return a tuple of token ids"
        raise make_failure(task, FailureKind.DATA, _WRONG_TYPE, detail)
    if not 0 <= int(ids.min()) <= int(ids.max()) <= _LARGEST_TOKEN:
        detail = f"{what} holds {int(ids.min())} to {int(ids.max())}; no token has such an id"
        raise make_failure(task, FailureKind.DATA, _WRONG_TYPE, detail)
    return tuple(ids.tolist())


def _are_token_ids(values: tuple[object, ...]) -> TypeGuard[tuple[int, ...]]:
    """Return whether these are Python integers in the range of a token."""
    if set(map(type, values)) != {int}:
        return False
    ids = cast("tuple[int, ...]", values)
    return min(ids) >= 0 and max(ids) <= _LARGEST_TOKEN


def check_answers(task: RolloutTask, values: Sequence[object], samples: int) -> tuple[str, ...]:
    """Return the values as final answers, one per sample. A long answer becomes a digest.

    Raises:
        RolloutFailed: A value is not text, or the number of values is wrong.
    """
    if len(values) != samples or not all(isinstance(value, str) for value in values):
        kinds = sorted({type(value).__name__ for value in values})
        detail = (
            f"{len(values)} answers of type {', '.join(kinds)} for {samples} samples; each is text"
        )
        raise make_failure(task, FailureKind.DATA, "answer_wrong_type", detail)
    return tuple(map(short_answer, map(str, values)))


def check_rewards(task: RolloutTask, values: Sequence[object], samples: int) -> list[float]:
    """Return the values as rewards, one per sample.

    Raises:
        RolloutFailed: A value is not a reward (the error is about the first one), or the number of
            values is wrong.
    """
    if len(values) != samples:
        detail = f"{len(values)} rewards for {samples} samples"
        raise make_failure(task, FailureKind.DATA, "reward_wrong_type", detail)
    if are_rewards(values):
        return values
    return [check_reward(task, value, sample) for sample, value in enumerate(values)]


def check_reward(task: RolloutTask, value: object, sample: int) -> float:
    """Return the value as the reward of a sample.

    Raises:
        RolloutFailed: The value is not a reward.
    """
    reward = parse_reward(value)
    if isinstance(reward, BadReward):
        raise make_failure(task, FailureKind.DATA, reward.reason, reward.detail, sample)
    return reward


def _check_answer(task: RolloutTask, result: GenerateResult, samples: int) -> None:
    if "abort" in result.finish_reasons:
        detail = f"{result.engine} aborted {result.request_id}"
        raise make_failure(task, FailureKind.INFRASTRUCTURE, "generation_aborted", detail)
    offsets, spans = result.offsets.tolist(), result.version_spans
    lengths = list(map(sub, offsets[1:], offsets))
    arrays = (len(result.token_ids), len(result.logprobs))
    if (
        lengths != [one[0][1] if len(one) == 1 else _count_tokens(one) for one in spans]
        or min(lengths, default=0) < 0
        or arrays != (offsets[-1], offsets[-1])
        or not samples == len(lengths) == len(result.finish_reasons)
    ):
        counted = [sum(count for _, count in sample) for sample in spans]
        detail = (
            f"{result.engine} gave a malformed answer to {result.request_id}: {samples} samples were "
            f"requested, but it has lengths {lengths}, spans of {counted}, arrays of {arrays}"
        )
        raise make_failure(task, FailureKind.INFRASTRUCTURE, "engine_answer", detail)
    if 0 in lengths:
        detail = f"{result.engine} generated no token for sample {lengths.index(0)}"
        raise make_failure(task, FailureKind.DATA, "empty_response", detail)


def _count_tokens(spans: VersionSpans) -> int:
    """Return the number of tokens in a sample's spans, or -1 if a span is negative."""
    counts = [count for _, count in spans]
    return sum(counts) if min(counts, default=0) >= 0 else -1
