"""Defines the protocol of environments: one object per worker that makes observations and rewards.

An environment is ``SingleTurn`` or ``MultiTurn``. Both run on the worker's event loop, many groups
at once. A method that waits is async. A method that computes for long belongs in a child process
(``function_reward``). If a method raises, the sample or its group fails, depending on
``rollout.on_failed_sample``, with reason ``environment_raised``. No failure ever becomes a reward
of 0. To request a later retry, raise ``EnvironmentUnavailable``, which is also defined here.

A custom environment subclasses one of the two. The recipe names it as ``module:Class`` in
``environment.target``. Each worker creates it once, as ``Class(tokenizer, **environment.options)``.
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.environments.reward_value import NamedRewards
from offbeat.messages.generation import GenerateResult
from offbeat.messages.groups import Prompt, RolloutTask
from offbeat.messages.media import Media


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """First observation with media, as the model's processor encodes it."""

    token_ids: tuple[int, ...]  # the placeholder tokens of the media are already expanded
    media: Media | None = None


class Environment(abc.ABC):
    """Base class of both forms of environment."""

    async def start(self) -> None:  # noqa: B027 - most environments hold nothing
        """Start the environment. Called once, before any other method."""

    async def close(self) -> None:  # noqa: B027
        """Close the environment. Called once, when no group is running any more."""

    @property
    def reward_calls(self) -> int:
        """Return how many calls of this process count against ``rollout.reward_call_budget``."""
        return 0

    @abc.abstractmethod
    def encode(self, prompt: Prompt) -> tuple[int, ...] | EncodedPrompt:
        """Return the first observation: at least one token, shared by all samples of the group.

        Return only token ids if the prompt has no media.
        """


class SingleTurn(Environment):
    """Environment with one model call per sample. One call scores all samples of a group."""

    @abc.abstractmethod
    async def score(
        self, task: RolloutTask, result: GenerateResult
    ) -> Sequence[float | NamedRewards]:
        """Return one finite reward per sample, in the order of ``result``.

        A reward may be ``NamedRewards``. The values in ``by_name`` are metrics, with the same names
        for each sample. Only ``reward`` is trained on. If scoring finds the final answer, set
        ``answer`` to the text that ``answers`` would return.
        """

    def answers(self, result: GenerateResult) -> Sequence[str]:
        """Return the final answer of each sample, as text that is equal for equal answers.

        The text is empty for a sample without an answer. If answers cannot be compared, return an
        empty sequence, as this method does. An evaluation then has no maj@k. Called only for
        evaluations, after ``score``, and not if ``score`` has set an answer.
        """
        del result
        return ()


@dataclass(frozen=True, slots=True)
class Response:
    """Output of the model in one turn."""

    token_ids: tuple[int, ...]  # the stop token that ended it is kept
    finish_reason: str  # stop | stop_string | length

    @property
    def content_ids(self) -> tuple[int, ...]:
        """Return the tokens without the stop token."""
        return self.token_ids[:-1] if self.finish_reason == "stop" else self.token_ids


class Episode(abc.ABC):
    """One sample of a multi-turn environment, from its first response to its reward."""

    @abc.abstractmethod
    async def step(self, response: Response) -> tuple[int, ...] | None:
        """Process the model's turn.

        Return the next observation as token ids, or None at the end.
        """

    @abc.abstractmethod
    async def reward(self) -> float:
        """Return the finite reward of the whole episode.

        Called once, after the last ``step``, so that your code gives every sample its reward.
        Also called if the episode was cut because no turn or no room for the observation was left.
        """

    def answer(self) -> str | None:
        """Return the final answer, as ``SingleTurn.answers`` does, or None if episodes have none.

        Called only for evaluations, after ``reward``.
        """
        return None


class MultiTurn(Environment):
    """Environment with several model calls per sample. Each sample is a separate episode."""

    @abc.abstractmethod
    def begin(self, task: RolloutTask, sample: int) -> Episode:
        """Create the episode of sample ``sample`` of the group."""


class EnvironmentUnavailable(Exception):
    """An environment or an async reward cannot reach its service, such as a sandbox or a judge.

    The prompt is not at fault, so the group is retried with growing waits, within
    ``rollout.infrastructure_retries``. The failure does not count against the engine. If a call of
    an async reward raises this, the call itself is retried before that: up to
    ``environment.reward_retries`` times, and not before ``retry_after_s``.

    Fix: none: your code raises this error. Raise ``rollout.infrastructure_retries`` for long
    outages.
    """

    def __init__(self, problem: str = "", *, retry_after_s: float = 0.0) -> None:
        super().__init__(problem)
        self.retry_after_s = retry_after_s
