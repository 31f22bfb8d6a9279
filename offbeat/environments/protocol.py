"""Protocol of environments: one object per worker that gives observations and rewards.

An environment is ``SingleTurn`` or ``MultiTurn``. Both run on the worker's event loop, many groups
at once: a method that waits is async, a method that computes long belongs in a child process
(``function_reward``). Whatever a method raises fails the sample, or its group, by
``rollout.on_failed_sample``, with reason ``environment_raised``; no failure ever becomes a reward of
0. ``EnvironmentUnavailable`` says that another moment will do.

A custom environment subclasses one of the two, is named ``module:Class`` in ``environment.target``
and is created once per worker, as ``Class(tokenizer, **environment.options)``.

Defines the error by which user code says that another moment will do.
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
    """First observation with media, as the model's own processor makes it."""

    token_ids: tuple[int, ...]  # the placeholder tokens of the media are already expanded
    media: Media | None = None


class Environment(abc.ABC):
    """Base class of both forms of environment."""

    async def start(self) -> None:  # noqa: B027 - most environments hold nothing
        """Start the environment. Called once, before any other method."""

    async def close(self) -> None:  # noqa: B027
        """Close the environment. Called once, at the end, when no group is running."""

    @property
    def reward_calls(self) -> int:
        """Return how often this process has called what ``rollout.reward_call_budget`` bounds."""
        return 0

    @abc.abstractmethod
    def encode(self, prompt: Prompt) -> tuple[int, ...] | EncodedPrompt:
        """Return the first observation: at least one token, shared by all samples of the group.

        Token ids alone where the prompt has no media.
        """


class SingleTurn(Environment):
    """Environment with one model call per sample; all samples of a group are scored in one call."""

    @abc.abstractmethod
    async def score(
        self, task: RolloutTask, result: GenerateResult
    ) -> Sequence[float | NamedRewards]:
        """Return one finite reward per sample, in the order of ``result``.

        Or ``NamedRewards``: the values in ``by_name`` are metrics, under the same names for each
        sample; ``reward`` alone is trained. Its ``answer`` is that of ``answers``, for a sample
        whose score finds it.
        """

    def answers(self, result: GenerateResult) -> Sequence[str]:
        """Return the final answer of each sample, as text that is equal for equal answers.

        Empty text for a sample without one; nothing at all where answers cannot be compared, as
        here: then an evaluation has no maj@k. Called for evaluations only, after ``score``, and not
        if that has named an answer.
        """
        del result
        return ()


@dataclass(frozen=True, slots=True)
class Response:
    """The model's output in one turn."""

    token_ids: tuple[int, ...]  # the stop token that ended it is kept
    finish_reason: str  # stop | stop_string | length

    @property
    def content_ids(self) -> tuple[int, ...]:
        """Tokens without the stop token."""
        return self.token_ids[:-1] if self.finish_reason == "stop" else self.token_ids


class Episode(abc.ABC):
    """One sample of a multi-turn environment, from its first response to its reward."""

    @abc.abstractmethod
    async def step(self, response: Response) -> tuple[int, ...] | None:
        """Process the model's turn; return the next observation as token ids, None at the end."""

    @abc.abstractmethod
    async def reward(self) -> float:
        """Return the finite reward of the whole episode.

        Called once, after the last ``step``, also if the episode was cut because no turn or no room
        for the observation was left, so that every sample gets a reward from its author.
        """

    def answer(self) -> str | None:
        """Return the final answer, as ``SingleTurn.answers``; None where there is no such thing.

        Called for evaluations only, after ``reward``.
        """
        return None


class MultiTurn(Environment):
    """Environment with several model calls per sample; each sample is an episode of its own."""

    @abc.abstractmethod
    def begin(self, task: RolloutTask, sample: int) -> Episode:
        """Create the episode of sample ``sample`` of the group."""


class EnvironmentUnavailable(Exception):
    """Raised by an environment or an async reward whose service is down: a sandbox, a judge.

    The prompt is not at fault: the group is retried with growing waits, within
    ``rollout.infrastructure_retries``. It does not count against the engine. An async reward is
    first called again itself, ``environment.reward_retries`` times and not before
    ``retry_after_s``.
    """

    def __init__(self, problem: str = "", *, retry_after_s: float = 0.0) -> None:
        super().__init__(problem)
        self.retry_after_s = retry_after_s
