"""Rolls out groups of an agent: each sample is one episode of the user's function at the endpoint.

| outcome of an episode                        | result                                           |
|----------------------------------------------|--------------------------------------------------|
| a reward, and turns in one branch            | a valid sample                                   |
| one of its requests failed in the engine     | the attempt of the group fails, by that failure  |
| the agent raised, exited, or sent no reward  | the sample fails, kind model                     |
| it never called the model                    | the sample fails, ``no_model_call``              |
| it exceeds ``environment.episode_deadline_s``| the sample fails, ``episode_deadline``; kind     |
|                                              | infrastructure if a request was open             |
| turns in more than one branch                | a valid sample, all of its branches are trained; |
|                                              | or it fails, ``branches``, and is not retried    |
| ``EnvironmentUnavailable``                   | the sample fails, kind infrastructure            |

``rollout.on_failed_sample`` decides whether a failed sample is retried or masked.
``rollout.branches`` decides whether branches are trained or masked. An evaluation trains nothing
and allows branches.

Also creates the agents of an environment worker.
"""

import asyncio
import resource
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import structlog

from offbeat.config.limits import max_sample_tokens
from offbeat.config.run import RunConfig
from offbeat.environments.environment_plugin import Agent, AgentClient
from offbeat.environments.reward_value import NamedRewards
from offbeat.generators.end_tokens import end_ids_of
from offbeat.messages.failures import FailureKind, OffbeatError, RolloutFailed
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.messages.groups import EPISODE_LATE, Receipt
from offbeat.messages.text import printable
from offbeat.plugins.agents.endpoint.chat_bridge import ChatBridge
from offbeat.plugins.agents.endpoint.server import AgentEndpoint
from offbeat.plugins.agents.endpoint.session import Branch, SampleSession, SessionLimits
from offbeat.plugins.agents.factory import make_agent
from offbeat.rollouts.calls import (
    EngineClient,
    Generate,
    check_reward,
    environment_code,
    make_failure,
)
from offbeat.rollouts.columns import Columns
from offbeat.rollouts.samples import (
    BRANCHES,
    Draw,
    SampleDraws,
    SampleFailurePolicy,
    pack_with_own_prompts,
)
from offbeat.rollouts.transcript import Transcript

_OTHERS: Final = 512
"""File descriptors that a worker needs besides agents' connections: for its processes, Ray and
files."""

_PER_EPISODE: Final = 16
"""Connections per episode, if the system allows them. Each may have a request open."""

_FEWEST: Final = 256
"""Minimum number of connections, because clients keep some that they do not use."""


class TooFewDescriptors(OffbeatError):
    """The operating system allows a worker fewer open files than its episodes need.

    Fix: raise ``ulimit -Hn``, or lower ``environment.reward_workers``.
    """

    episodes: int
    needed: int
    limit: int

    def __str__(self) -> str:
        return (
            f"{self.episodes} episodes at once need {self.needed} open files in their environment "
            f"worker; the hard limit is {self.limit}. Raise it (ulimit -Hn), or lower "
            "environment.episodes_per_child or environment.reward_workers"
        )


def raise_descriptor_limit(episodes: int) -> int:
    """Raise the soft limit of open files for ``episodes``; return how many connections fit.

    Each episode needs at least one connection. As far as the hard limit permits, the soft limit
    allows the maximum per episode.

    Raises:
        TooFewDescriptors: The hard limit is lower.
    """
    needed, most = episodes + _OTHERS, max(_FEWEST, episodes * _PER_EPISODE)
    soft, hard = (
        sys.maxsize if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    if hard < needed:
        raise TooFewDescriptors(episodes, needed, hard)
    allowed = max(soft, min(hard, most + _OTHERS))
    if allowed > soft:
        _, unchanged = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, unchanged))
    return min(most, allowed - _OTHERS)


log = structlog.stdlib.get_logger()
_LOGGED: Final = 8  # refusals of different texts, per process
MODEL = "policy"
"""Name under which agents request the model."""


class AgentGroups:
    """The endpoint and the agent processes of one environment worker.

    All methods belong to one event loop.
    """

    def __init__(
        self,
        agent: Agent,
        bridge: ChatBridge,
        limits: SessionLimits,
        branches: Literal["train", "mask"] = "train",
    ) -> None:
        """Start nothing yet. ``branches``: whether a sample's branches are trained or masked."""
        self._agent, self._bridge, self._limits = agent, bridge, limits
        self._trains_branches = branches == "train"
        self._endpoint = AgentEndpoint(MODEL)
        self._logged_refusals = set[str]()

    async def start(self) -> None:
        """Start the agent processes, then listen.

        Raises:
            TooFewDescriptors: Not every episode can have a connection.
            RewardFailed: The agent cannot be imported.
        """
        connections = raise_descriptor_limit(self._agent.episodes)
        await self._agent.start()
        await self._endpoint.start(connections)

    async def close(self) -> None:
        """Kill the agent processes and stop listening. No group may be running."""
        await self._agent.close()
        await self._endpoint.close()

    async def run_group(
        self, engine: EngineClient, policy: SampleFailurePolicy
    ) -> tuple[Receipt, Columns]:
        """Play an episode for each sample of the task, score and pack them.

        The columns follow ``transfer_queue.schema`` and are checked. Cancelling kills the episodes
        and cancels every open ``generate``. Errors of ``generate`` are raised unchanged.

        Raises:
            RolloutFailed: A sample fails as in the module's table and the policy fails its group,
                too few samples are valid, or ``prompts_differ``.
        """
        draws = SampleDraws.begin(engine.task, policy, engine.generate)

        def make_draw(sample: int) -> Draw:
            async def draw(transcript: Transcript, retry: int, generate: Generate) -> None:
                async def time_generate(request: GenerateRequest) -> GenerateResult:
                    began = time.perf_counter()
                    try:
                        return await generate(request)
                    finally:
                        transcript.generate_s += time.perf_counter() - began

                client = replace(engine, generate=time_generate)
                session = SampleSession(client, self._bridge, sample, retry, self._limits)
                await self._play(session, transcript)

            return draw

        return pack_with_own_prompts(engine.task, await draws.draw_all(make_draw))

    async def _play(self, session: SampleSession, transcript: Transcript) -> None:
        began, api_key = time.perf_counter(), self._endpoint.open(session)
        branches: tuple[Branch, ...] = ()
        try:
            rewards = await self._rewards(session, api_key)
            transcript.reward, transcript.rewards_by_name = rewards.reward, rewards.by_name
            if session.engine.task.evaluation:
                transcript.answer = rewards.answer
        finally:
            branches = await self._endpoint.finish(api_key)
            transcript.refused_requests = session.refused_requests
            self._log_refusal(session)
            if branches:
                later = branches[1:] if self._trains_branches else ()
                transcript.take(branches[0].transcript, [branch.transcript for branch in later])
            transcript.reward_s = time.perf_counter() - began - transcript.generate_s
        if session.failure is not None:
            raise session.failure  # even if the agent caught the error
        self._check_branches(session, branches)

    def _log_refusal(self, session: SampleSession) -> None:
        """Log the first refusals with different texts. The agent may have caught the error."""
        refused = session.last_refusal
        if (
            refused
            and refused not in self._logged_refusals
            and len(self._logged_refusals) < _LOGGED
        ):
            self._logged_refusals.add(refused)
            group = session.engine.task.prompt_index
            log.warning(
                "agent.request_refused",
                group=group,
                sample=session.sample,
                refusal=printable(refused),
            )

    async def _rewards(self, session: SampleSession, api_key: str) -> NamedRewards:
        """Play an episode. If its session fails, kill it at once.

        Raises:
            RolloutFailed: The agent failed.
            Exception: The session failed. Raised even if the agent has failed, too.
        """
        task, client = session.engine.task, AgentClient(self._endpoint.base_url, api_key, MODEL)
        try:
            async with asyncio.TaskGroup() as episode:
                failing = episode.create_task(session.raise_failure(), name="session-failure")
                try:
                    with environment_code(task):
                        rewards = await self._agent.run(task, client)
                except RolloutFailed as failure:
                    if failure.reason == EPISODE_LATE and session.open_requests:
                        failure.kind = FailureKind.INFRASTRUCTURE
                        failure.detail += ", and waited for the model"
                    raise
                metrics = (value for value in rewards.by_name.values() if value is not None)
                for value in (rewards.reward, *metrics):
                    check_reward(task, value, session.sample)
                failing.cancel()
        except ExceptionGroup as errors:
            raise session.failure or errors.exceptions[0] from errors
        return rewards

    def _check_branches(self, session: SampleSession, branches: tuple[Branch, ...]) -> None:
        """Check that the sample has something to train, and that the recipe trains it.

        Raises:
            RolloutFailed: ``no_model_call``, ``branches``.
        """
        task = session.engine.task
        if not branches:
            detail = "the agent returned without an answer of the model"
            if session.last_refusal:
                detail += f"; the last of its requests was refused: {session.last_refusal}"
            else:
                detail += "; requests count that go to client.base_url with client.api_key"
            raise make_failure(task, FailureKind.DATA, "no_model_call", detail)
        if len(branches) == 1 or self._trains_branches or task.evaluation:
            return
        reasons = Counter(branch.reason.value for branch in branches)
        drawn = sum(len(turn.result.token_ids) for turn in session.turns)
        detail = (
            f"its {len(session.turns)} turns with {drawn} tokens drawn are "
            f"{len(branches)} branches "
            f"({', '.join(f'{n} {reason}' for reason, n in reasons.items())}), but "
            "rollout.branches=mask trains only samples with one branch: set it to train, or keep every answer in "
            "the conversation, unchanged"
        )
        raise make_failure(task, FailureKind.DATA, BRANCHES, detail)


def make_agents(
    config: RunConfig,
    tokenizer: Any,  # noqa: ANN401 -- of transformers
    working_dir: Path,
    began_with: Mapping[str, str],
    stop_token_ids: Sequence[int],
) -> "AgentGroups":
    """Create the endpoint and the agent processes of a worker, without starting them.

    Raises:
        BadEnvironment: As ``make_bridge``: no conversation can be encoded.
    """
    # Other environments do not need these packages.
    from offbeat.plugins.agents.endpoint.bridges import bridge_renderer, make_bridge  # noqa: PLC0415
    from offbeat.plugins.agents.endpoint.session import SessionLimits  # noqa: PLC0415

    environment = config.environment
    ends = [*end_ids_of(config.model.path), *stop_token_ids]
    bridge = make_bridge(tokenizer, bridge_renderer(environment), ends)
    agent = make_agent(environment, working_dir, began_with, model_path=config.model.path)
    rollout = config.rollout
    limits = SessionLimits(
        max_branches=rollout.max_branches, max_sample_tokens=max_sample_tokens(config)
    )
    return AgentGroups(agent, bridge, limits, rollout.branches)
