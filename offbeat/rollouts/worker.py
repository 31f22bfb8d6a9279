"""Runs the episodes of many groups concurrently on the event loop of an environment worker.

The process around the worker calls ``admit`` and ``roll_out`` for the controller, and sends the
worker's requests to the engines.

This module also defines the protocols of the agent plug-in that a worker uses.

The worker masks samples that ran out of tokens, and penalises responses whose length is near the
limit. Both methods are DAPO's, arXiv:2503.14476, section 3.4. They do not apply to evaluations.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol, Self, cast

import msgspec
import numpy as np

from offbeat.algorithms.advantages import AdvantagesNotFinite, RewardsNotFinite
from offbeat.algorithms.custom_advantage import AdvantageRefused, load_estimator
from offbeat.config.by_value import PackedValue, unpack
from offbeat.config.limits import on_failed_sample
from offbeat.config.mixture import environment_views, inputs_in, sampling_identity
from offbeat.config.run import RunConfig
from offbeat.config.sections.rollout import RolloutConfig
from offbeat.doors import find_only
from offbeat.environments.exits import contain_exits
from offbeat.environments.factory import make_environment
from offbeat.environments.media_prompts import MediaEncoder, find_media
from offbeat.environments.protocol import Environment
from offbeat.environments.text import Tokenizer
from offbeat.environments.tokenizer import TokenizerClass, load_tokenizer
from offbeat.messages.failures import (
    ActorLost,
    Component,
    EngineUnavailable,
    FailureKind,
    InvalidRequest,
    RemoteBug,
    RolloutFailed,
)
from offbeat.messages.fences import Fence, FenceGuard
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams
from offbeat.messages.groups import LATE, Receipt, RolloutTask
from offbeat.messages.media import get_media
from offbeat.messages.text import first_line
from offbeat.messages.worker_report import WorkerReport
from offbeat.models.media_rules import TEXT_ALONE, MediaTokens, media_tokens
from offbeat.rollouts.calls import EngineClient, Generate, UniqueRequests, environment_code
from offbeat.rollouts.deadline import within_deadline
from offbeat.rollouts.failure_log import FailureLog
from offbeat.rollouts.group import PromptMedia, run_group
from offbeat.rollouts.response_text import TextlessTokens, branch_texts, response_texts
from offbeat.rollouts.rollout_log import RolloutLog
from offbeat.rollouts.samples import SampleFailurePolicy
from offbeat.rollouts.spooling import Spooling
from offbeat.run_files.files import RunFiles
from offbeat.run_files.sharing import Sharing, WriteLocation
from offbeat.telemetry.logs import Redactor, new_incarnation
from offbeat.transfer_queue import schema
from offbeat.transfer_queue.schema import Columns
from offbeat.transfer_queue.spool import FOLDER, SpoolWriter

PENALTY: Final = "overlong_penalty"
"""Name under which a receipt lists the penalty that was subtracted from each sample's reward."""


def overlong_penalty(tokens: int, rollout: RolloutConfig, max_new_tokens: int) -> float:
    """Return the penalty of a response with this many tokens: DAPO's soft overlong punishment.

    It is 0 up to ``max_new_tokens - overlong_tokens``, rises linearly from there, and is
    ``overlong_penalty`` at ``max_new_tokens``. Equation 13.
    """
    if rollout.overlong_tokens is None:
        return 0.0
    over = tokens - (max_new_tokens - rollout.overlong_tokens)
    return rollout.overlong_penalty * min(1.0, max(0.0, over / rollout.overlong_tokens))


def by_length(
    task: RolloutTask,
    receipt: Receipt,
    columns: Columns,
    rollout: RolloutConfig,
    max_new_tokens: int,
) -> tuple[Receipt, Columns]:
    """Return the group with its long samples penalised and its truncated samples masked.

    A masked sample keeps its place and its reward, and still influences the advantages of the
    others. It has no trained token (``valid_tokens`` 0), so it does not count in the loss. A failed
    sample is not changed.
    """
    if task.evaluation:
        return receipt, columns
    if rollout.overlong_tokens is not None:
        receipt, columns = _punish_overlong(receipt, columns, rollout, max_new_tokens)
    if rollout.truncated_samples == "mask_loss" and receipt.truncated_samples:
        receipt, columns = mask_truncated(receipt, columns)
    return receipt, columns


def _punish_overlong(
    receipt: Receipt, columns: Columns, rollout: RolloutConfig, max_new_tokens: int
) -> tuple[Receipt, Columns]:
    samples = zip(receipt.valid, receipt.valid_tokens, strict=True)
    penalties = tuple(
        overlong_penalty(tokens, rollout, max_new_tokens) if valid else 0.0
        for valid, tokens in samples
    )
    rewards = np.asarray(columns[schema.REWARDS], np.float32) - np.array(penalties, np.float32)
    changed = msgspec.structs.replace(
        receipt,
        rewards=tuple(rewards.tolist()),
        rewards_by_name=(*receipt.rewards_by_name, (PENALTY, penalties)),
    )
    return changed, {**columns, schema.REWARDS: rewards}


def mask_truncated(receipt: Receipt, columns: Columns) -> tuple[Receipt, Columns]:
    """Return the group with no trained token in its truncated samples."""
    mask = np.array(columns[schema.LOSS_MASK], np.bool_)  # a copy
    ends = np.cumsum((0, *receipt.response_tokens)).tolist()
    for is_cut, (start, end) in zip(receipt.truncated, pairwise(ends), strict=True):
        if is_cut:
            mask[start:end] = False
    valid = zip(receipt.valid_tokens, receipt.truncated, strict=True)
    valid_tokens = tuple(0 if is_cut else tokens for tokens, is_cut in valid)
    changed = msgspec.structs.replace(receipt, valid_tokens=valid_tokens)
    return changed, {**columns, schema.LOSS_MASK: mask}


class AgentPlayer(Protocol):
    """Plug-in that plays the groups of environments with ``is_agent``."""

    def make_agents(
        self,
        config: RunConfig,
        tokenizer: Any,  # noqa: ANN401 -- of transformers
        working_dir: Path,
        began_with: Mapping[str, str],
        stop_token_ids: Sequence[int],
    ) -> "WorkerAgents":
        """Create the agents of a worker, before their ``start``.

        ``config`` is the recipe as their environment sees it. ``stop_token_ids`` end a response.

        Raises:
            BadEnvironment: Conversations cannot be encoded, or an agent cannot be created.
        """
        ...


class WorkerAgents(Protocol):
    """Agents of a worker. They play the episodes of a group in separate processes of user code."""

    async def start(self) -> None:
        """Start the agents. Called once, before any other method."""
        ...

    async def close(self) -> None:
        """Stop the agents. No group may be running."""
        ...

    async def run_group(
        self, engine: EngineClient, policy: SampleFailurePolicy
    ) -> tuple[Receipt, Columns]:
        """Play, score and pack one episode per sample of the engine client's task."""
        ...


def find_agent_player() -> AgentPlayer:
    """Return the plug-in of agents.

    Raises:
        PluginUnusable: The plug-in's folder is missing, or its import fails.
    """
    return cast("AgentPlayer", find_only("agents"))


_SILENT: Final = 0.25
"""If an engine answers nothing for this fraction of a deadline, a late group counts as a strike."""

GenerateOn = Callable[[str, GenerateRequest], Awaitable[GenerateResult]]
"""Sends a request to the named engine and raises failures that ``classify`` recognizes."""


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """Constructor arguments of a worker. Picklable, so that a restart builds the same worker."""

    name: str
    config: RunConfig
    working_dir: str  # directory from which user reward code is imported
    run_dir: str
    # Actor names by engine, because a handle would not survive the driver's object store. Empty:
    # engines are in the worker's process.
    engines: Mapping[str, str] = field(default_factory=dict[str, str])
    sharing: Sharing | None = None  # None: there is only one machine
    # Input digests that the run began with
    inputs: Mapping[str, str] = field(default_factory=dict[str, str])
    tokenizer: TokenizerClass | None = None  # None: ``AutoTokenizer`` chooses the class
    values: tuple[PackedValue, ...] = ()  # objects that the user passed by value


class EnvironmentWorker:
    """Environments of one worker, its logs and its spool.

    Create it in any thread. All methods belong to one event loop.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        place: WriteLocation,
        generate: GenerateOn,
        *,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        """Create the environments. The first group starts them.

        Args:
            spec: Settings of the worker.
            place: Where this process writes.
            generate: Sends the requests of the worker to its engines.
            cpu_clock: Returns the CPU seconds to report. Pass ``time.thread_time`` if other
                components of the run share the process.

        Raises:
            As ``EnvironmentRunner.make``.
        """
        unpack(spec.values)
        self._spec, self._generate, self._cpu_clock = spec, generate, cpu_clock
        self._incarnation = incarnation = new_incarnation(spec.name)
        self._requests = UniqueRequests(incarnation)
        self._guard = FenceGuard(spec.name)
        self._sampled_under = sampling_identity(spec.config)
        working_dir = Path(spec.working_dir)
        self._environments = {
            name: EnvironmentRunner.make(
                view, working_dir, inputs_in(name, spec.inputs), spec.tokenizer
            )
            for name, view in environment_views(spec.config).items()
        }
        self._advantages_of = load_estimator(spec.config.algorithm, working_dir)
        self._log = RolloutLog(place.directory / "rollouts", incarnation, files=place.files)
        redactor = Redactor.from_environment(config=spec.config)
        self._failures = FailureLog(place.files or RunFiles(place.directory), redactor)
        self._spooling: Spooling | None = None
        # Nobody would remove spooled groups that no controller can read.
        if spec.config.transfer_queue.spool != "off" and place.files is None:
            spool = place.directory / FOLDER
            self._spooling = Spooling(
                SpoolWriter(spool, spec.name, incarnation.removeprefix(f"{spec.name}-"))
            )
        self._started: asyncio.Task[None] | None = None
        self._answered_at = dict[str, float]()  # by engine, of the event loop's clock

    @property
    def incarnation(self) -> str:
        """Return the name of this worker, which is unique among all workers of the run."""
        return self._incarnation

    def admit(self, fence: Fence) -> None:
        """Accept the controller that sends the next groups, or refuse it.

        The first group of a controller starts new segments of the spool. From the first call of
        this method on, the running event loop survives user code that exits.

        Raises:
            StaleFence: The controller has been replaced.
        """
        contain_exits()
        self._guard.check(fence)
        if self._spooling is not None:
            self._spooling.begin(f"{fence.run_id}/{fence.incarnation}")

    async def roll_out(self, task: RolloutTask) -> tuple[Receipt, Columns]:
        """Roll out one group, log it and spool it.

        Returns:
            The receipt for the controller, and the columns for the trainer.

        Raises:
            RolloutFailed: Any failure, classified by ``classify`` unless it is typed already.
        """
        config = self._spec.config
        environment = self._environments[task.prompt.environment]
        try:
            await self._start_once()
            receipt, columns = await within_deadline(
                task,
                partial(self._requests.send, partial(self._send, task.engine)),
                partial(environment.run_group, task, self._failures),
            )
        except RolloutFailed as failure:
            self._spare_busy_engine(task, failure)
            self._failures.add(task, failure, environment.tokenizer)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # classified here, before it crosses processes
            failure = classify(error, task)
            failure.__cause__ = error
            self._failures.add(task, failure, environment.tokenizer)
            raise failure from error
        max_new_tokens = config.generator.sampling.max_new_tokens
        receipt, columns = by_length(task, receipt, columns, config.rollout, max_new_tokens)
        textless = environment.textless
        receipt = msgspec.structs.replace(
            receipt,
            sampling=self._sampled_under,
            textless_tokens=0 if textless is None else textless.count_trained(columns),
        )
        if config.rollout.log and not task.evaluation:
            tokenizer = environment.tokenizer
            self._log.add(
                task,
                receipt,
                columns,
                texts=() if tokenizer is None else branch_texts(tokenizer, columns),
                advantages=self._advantages(receipt),
            )
        if self._spooling is not None and not task.evaluation:
            receipt = await self._spooling.spool_group(receipt, columns)
        return receipt, columns

    async def _send(self, engine: str, request: GenerateRequest) -> GenerateResult:
        result = await self._generate(engine, request)
        self._answered_at[engine] = asyncio.get_running_loop().time()
        return result

    def _spare_busy_engine(self, task: RolloutTask, failure: RolloutFailed) -> None:
        """Do not blame an engine for a late group if it has just answered another request.

        The late group's request was sent late because an episode hung, or it asks for more than the
        deadline allows. Replacing the engine would abort the requests of all other groups.
        """
        if failure.reason != LATE or failure.source is not Component.ENGINE:
            return
        silent_s = asyncio.get_running_loop().time() - self._answered_at.get(task.engine, -math.inf)
        if silent_s < _SILENT * task.deadline_s:
            failure.source = Component.WORKER
            failure.detail += f"; {task.engine} answers other requests"

    def _advantages(self, receipt: Receipt) -> Sequence[float]:
        """Return the advantages that the controller will compute, or none for refused rewards."""
        try:
            return self._advantages_of(receipt.rewards, receipt.valid)
        except (AdvantageRefused, AdvantagesNotFinite, RewardsNotFinite):
            return ()

    def report(self) -> WorkerReport:
        """Return counts of this worker's activity so far."""
        calls = sum(each.reward_calls for each in self._environments.values())
        return WorkerReport(self._incarnation, calls, self._cpu_clock())

    async def close(self) -> WorkerReport:
        """Write logged groups and close the environments. No group may be running.

        Returns:
            The last report, which counts the calls of cancelled groups.
        """
        await self._log.close()
        self._failures.close()
        if self._spooling is not None:
            await self._spooling.close()
        for each in self._environments.values():
            await each.close()
        return self.report()

    async def _start_once(self) -> None:
        if self._started is None:
            self._started = asyncio.ensure_future(self._start())
        await asyncio.shield(self._started)

    async def _start(self) -> None:
        for each in self._environments.values():
            await each.start()


@dataclass(frozen=True, slots=True)
class EnvironmentRunner:
    """One environment of a worker, and the settings for rolling out its groups."""

    config: RunConfig  # the view of this environment
    sampling: SamplingParams
    environment: Environment | WorkerAgents
    tokenizer: Tokenizer | None = None  # None: the environment needs none
    media: MediaEncoder | None = None  # None: prompts have no media
    tokens: MediaTokens = TEXT_ALONE  # of the model; no text may hold them
    textless: TextlessTokens | None = None  # None: no tokenizer

    @classmethod
    def make(
        cls,
        view: RunConfig,
        working_dir: Path,
        began_with: Mapping[str, str],
        tokenizer_class: TokenizerClass | None = None,
    ) -> Self:
        """Create the environment, before its ``start``.

        Raises:
            As ``make_environment``, ``AgentPlayer.make_agents`` and ``MediaPlugin.encoder``.
        """
        section = view.generator.sampling
        sampling = SamplingParams(
            temperature=section.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            min_p=section.min_p,
            max_new_tokens=section.max_new_tokens,
            stop_token_ids=section.stop_token_ids,
            stop=section.stop,
        )
        tokenizer, tokens, textless = load_tokenizer(view, tokenizer_class), TEXT_ALONE, None
        if tokenizer is not None:
            textless = TextlessTokens(tokenizer)
            remote = view.model.trust_remote_code
            tokens = media_tokens(view.model.path, tokenizer, trust_remote_code=remote)
        if view.environment.is_agent:
            player, ends = find_agent_player(), sampling.stop_token_ids
            agents = player.make_agents(view, tokenizer, working_dir, began_with, ends)
            return cls(view, sampling, agents, tokenizer, None, tokens, textless)
        environment = make_environment(view.environment, tokenizer, working_dir, began_with)
        media = find_media().encoder(view)
        return cls(view, sampling, environment, tokenizer, media, tokens, textless)

    @property
    def reward_calls(self) -> int:
        """Return the calls made so far. Calls by an agent's program are not counted."""
        return self.environment.reward_calls if isinstance(self.environment, Environment) else 0

    async def start(self) -> None:
        """Start the environment. Called once, before any other method."""
        await self.environment.start()

    async def close(self) -> None:
        """Close the environment. No group may be running."""
        await self.environment.close()
        if self.media is not None:
            self.media.close()

    async def run_group(
        self, task: RolloutTask, failures: FailureLog, generate: Generate
    ) -> tuple[Receipt, Columns]:
        """Roll out one group. For an evaluation, also add texts, and small copies of media.

        Raises:
            RolloutFailed: Raised by ``offbeat.rollouts.group.run_group``.
        """
        receipt, columns = await self._run_episodes(task, failures, generate)
        if task.evaluation and self.tokenizer is not None:
            with environment_code(task):  # a tokenizer may come with the model, as code
                texts = response_texts(self.tokenizer, receipt, columns)
            receipt = msgspec.structs.replace(receipt, texts=texts)
        if task.evaluation:
            previews = find_media().previews(get_media(columns))
            receipt = msgspec.structs.replace(receipt, previews=previews)
        return receipt, columns

    async def _run_episodes(
        self, task: RolloutTask, failures: FailureLog, generate: Generate
    ) -> tuple[Receipt, Columns]:
        config = self.config
        policy = SampleFailurePolicy(
            on_failed_sample(config),
            config.rollout.sample_retries,
            partial(failures.add, tokenizer=self.tokenizer),
        )
        max_model_len = config.generator.max_model_len
        if not isinstance(self.environment, Environment):
            engine = EngineClient(
                task, generate, self.sampling, max_model_len, media_tokens=self.tokens
            )
            return await self.environment.run_group(engine, policy)
        return await run_group(
            task,
            self.environment,
            generate,
            self.sampling,
            max_turns=config.environment.max_turns,
            max_model_len=max_model_len,
            policy=policy,
            media=PromptMedia(self.media, config.environment.max_media_bytes, self.tokens),
        )


def classify(error: BaseException, task: RolloutTask) -> RolloutFailed:
    """Classify a rollout's error by whether a retry may help. An unknown error is a bug."""
    match error:
        case ActorLost():
            kind, reason = FailureKind.INFRASTRUCTURE, "engine_lost"
        case EngineUnavailable():
            kind, reason = FailureKind.INFRASTRUCTURE, "engine_unavailable"
        case InvalidRequest():
            kind, reason = FailureKind.DATA, "invalid_request"
        case RemoteBug():
            kind, reason = FailureKind.BUG, "engine_raised"
        case _:
            kind, reason = FailureKind.BUG, type(error).__name__
    return RolloutFailed(kind, task.prompt_index, task.attempt, reason, first_line(error))
