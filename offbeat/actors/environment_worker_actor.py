"""Ray actor that runs episodes: many groups concurrently on one event loop."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# Ray declares functions without the types of their parameters.

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import msgspec
import ray

from offbeat.actors.call import reply_of
from offbeat.actors.call_batching import BatchedReply, CallBatcher, Exchange, ReplyBatcher
from offbeat.actors.handles import Handle
from offbeat.actors.ray_run_files import prepared
from offbeat.actors.ray_worker import LIVENESS
from offbeat.config.limits import on_failed_sample
from offbeat.config.mixture import environment_views, inputs_in
from offbeat.config.run import RunConfig
from offbeat.config.sampling_identity import sampling_identity
from offbeat.endpoint.worker_agents import make_agents
from offbeat.environments.exits import contain_exits
from offbeat.environments.factory import make_environment
from offbeat.environments.media_prompts import MediaEncoder, media_prompts
from offbeat.environments.protocol import Environment
from offbeat.environments.text import Tokenizer
from offbeat.environments.tokenizer import load_tokenizer
from offbeat.messages.failures import (
    ActorLost,
    EngineUnavailable,
    FailureKind,
    InvalidRequest,
    OffbeatError,
    RemoteBug,
    RolloutFailed,
)
from offbeat.messages.fence_guard import FenceGuard
from offbeat.messages.fences import Fence
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams
from offbeat.messages.groups import Receipt, RolloutTask
from offbeat.messages.media import media_of
from offbeat.messages.text import first_line
from offbeat.messages.worker_report import WorkerReport
from offbeat.multimodal.prompt_tokens import TEXT_ALONE, MediaTokens, media_tokens
from offbeat.rollouts.calls import EngineClient, Generate, UniqueRequests, environment_code
from offbeat.rollouts.deadline import within_deadline
from offbeat.rollouts.failure_log import FailureLog
from offbeat.rollouts.group import PromptMedia, run_group
from offbeat.rollouts.media_log import media_log
from offbeat.rollouts.response_text import TextlessTokens, response_texts
from offbeat.rollouts.rollout_log import RolloutLog
from offbeat.rollouts.samples import SampleFailurePolicy
from offbeat.rollouts.spooling import Spooling
from offbeat.rollouts.truncation import by_length
from offbeat.run_files.files import RunFiles
from offbeat.run_files.sharing import Sharing
from offbeat.telemetry.process import new_incarnation
from offbeat.telemetry.redaction import Redactor
from offbeat.transfer_queue.schema import Columns
from offbeat.transfer_queue.spool import FOLDER, SpoolWriter

if TYPE_CHECKING:
    from offbeat.endpoint.agent_groups import AgentGroups

COALESCED_BYTES: Final = 4 * 2**20
"""Bytes from which on a reply carries no further group.

A reply is one object of Ray's store, which costs about 2 ms of CPU whatever its size. The object is
freed with its last group, so a larger bound would keep more memory of trained groups.
"""


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """Constructor arguments of a worker; picklable, so that a restart builds the same worker."""

    name: str
    config: RunConfig
    working_dir: str  # directory that user reward code is imported from
    run_dir: str
    engines: Mapping[str, str]  # actor names; a handle would not survive the driver's object store
    sharing: Sharing | None = None  # None: there is only one machine
    # Input digests that the run began with
    inputs: Mapping[str, str] = field(default_factory=dict[str, str])


class EnvironmentActor:
    """Async actor of one environment worker."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        place = prepared(spec.name, spec.run_dir, spec.sharing, spec.config)
        self._spec = spec
        self._incarnation = incarnation = new_incarnation(spec.name)
        self._engines: dict[str, CallBatcher[GenerateRequest, GenerateResult]] = {}
        self._requests = UniqueRequests(incarnation)
        self._groups = ReplyBatcher(
            self._roll_out,
            _as_failure,
            weigh=lambda group: group[0].payload_bytes,
            limit=COALESCED_BYTES,
        )
        self._guard = FenceGuard(spec.name)
        self._sampled_under = sampling_identity(spec.config)
        self._environments = {
            name: EnvironmentRunner.made(view, Path(spec.working_dir), inputs_in(name, spec.inputs))
            for name, view in environment_views(spec.config).items()
        }
        self._log = RolloutLog(place.directory / "rollouts", incarnation, files=place.files)
        redactor = Redactor.from_environment(config=spec.config)
        self._failures = FailureLog(place.files or RunFiles(place.directory), redactor)
        self._spooling: Spooling | None = None
        # Spooled groups that no controller could read would never be removed.
        if spec.config.transfer_queue.spool == "ready" and place.files is None:
            spool = place.directory / FOLDER
            self._spooling = Spooling(
                SpoolWriter(spool, spec.name, incarnation.removeprefix(f"{spec.name}-"))
            )
        self._started: asyncio.Task[None] | None = None

    @ray.method(num_returns=2)
    async def exchange(
        self,
        fence: Fence,
        requests: Sequence[tuple[int, RolloutTask]],
        cancelled: Sequence[int],
        doubted: Sequence[int] = (),
    ) -> tuple[tuple[WorkerReport, list[BatchedReply[Receipt]]], list[Columns]]:
        """Roll groups out; see ``offbeat.actors.call_batching``.

        Returns:
            The report of this process and the receipts, for the controller; and the columns of the
            successful groups, in the same order, for the trainer. Failures are ``RolloutFailed``,
            classified where they happened.
        """
        contain_exits()
        self._guard.check(fence)
        incarnation = f"{fence.run_id}/{fence.incarnation}"
        if self._spooling is not None:
            self._spooling.begin(incarnation)
        answers = await self._groups.exchange(
            "controller", incarnation, requests, cancelled, doubted
        )
        receipts = [
            BatchedReply(each.id, each.value[0] if each.value else None, each.failure)
            for each in answers
        ]
        columns = [each.value[1] for each in answers if each.value]
        return (self._report(), receipts), columns

    def _report(self) -> WorkerReport:
        calls = sum(each.reward_calls for each in self._environments.values())
        return WorkerReport(self._incarnation, calls, time.process_time())

    async def _roll_out(self, task: RolloutTask) -> tuple[Receipt, Columns]:
        config = self._spec.config
        environment = self._environments[task.prompt.environment]
        try:
            await self._start_once()
            receipt, columns = await within_deadline(
                task,
                partial(self._requests.send, partial(self._generate, task.engine)),
                partial(environment.run_group, task, self._failures),
            )
        except RolloutFailed as failure:
            self._failures.add(task, failure, environment.tokenizer)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # classified here, before it crosses processes
            failure = classified(error, task)
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
            self._log.add(task, receipt, columns)
        if self._spooling is not None and not task.evaluation:
            receipt = await self._spooling.spooled(receipt, columns)
        return receipt, columns

    async def _generate(self, engine: str, request: GenerateRequest) -> GenerateResult:
        return await self._engine(engine).call(request)

    def _engine(self, name: str) -> CallBatcher[GenerateRequest, GenerateResult]:
        """Return the engine of that name, looked up at its first request.

        A retired one has no actor.

        Raises:
            ActorLost: No actor has the name.
        """
        engine = self._engines.get(name)
        if engine is None:
            try:
                handle = ray.get_actor(self._spec.engines[name])
            except ValueError as error:
                raise ActorLost(name, "look-up", first_line(error)) from error
            exchange = _exchange_with(name, handle, self._spec.name, self._incarnation)
            engine = self._engines[name] = CallBatcher(exchange)
        return engine

    async def ping(self) -> WorkerReport:  # a reply shows that the process is alive
        return self._report()

    @ray.method(concurrency_group=LIVENESS)
    async def alive(self) -> None: ...  # also while an environment blocks the other methods

    async def close(self) -> WorkerReport:
        """Return the last report, which counts the calls of what was cancelled."""
        await self._groups.close()
        await self._log.close()
        self._failures.close()
        if self._spooling is not None:
            await self._spooling.close()
        for each in self._environments.values():
            await each.close()
        return self._report()

    async def _start_once(self) -> None:
        if self._started is None:
            self._started = asyncio.ensure_future(self._start())
        await asyncio.shield(self._started)

    async def _start(self) -> None:
        for each in self._environments.values():
            await each.start()


@dataclass(frozen=True, slots=True)
class EnvironmentRunner:
    """One environment of a worker, and the settings that its groups are rolled out under."""

    config: RunConfig  # the view of this environment
    sampling: SamplingParams
    environment: "Environment | AgentGroups"
    tokenizer: Tokenizer | None = None  # None: the environment needs none
    media: MediaEncoder | None = None  # None: prompts have no media
    tokens: MediaTokens = TEXT_ALONE  # of the model, which no text may hold
    textless: TextlessTokens | None = None  # None: there is no tokenizer

    @classmethod
    def made(cls, view: RunConfig, working_dir: Path, began_with: Mapping[str, str]) -> Self:
        """Create the environment; it is not started yet.

        Raises:
            As ``make_environment``, ``make_agent``, ``make_verifiers`` and ``MediaPrompts.encoder``.
        """
        section = view.generator.sampling
        sampling = SamplingParams(
            temperature=section.temperature,
            top_p=section.top_p,
            max_new_tokens=section.max_new_tokens,
            stop_token_ids=section.stop_token_ids,
        )
        tokenizer, tokens, textless = load_tokenizer(view), TEXT_ALONE, None
        if tokenizer is not None:
            textless = TextlessTokens(tokenizer)
            remote = view.model.trust_remote_code
            tokens = media_tokens(view.model.path, tokenizer, trust_remote_code=remote)
        if view.environment.is_agent:
            agents = make_agents(view, tokenizer, working_dir, began_with, sampling.stop_token_ids)
            return cls(view, sampling, agents, tokenizer, None, tokens, textless)
        environment = make_environment(view.environment, tokenizer, working_dir, began_with)
        media = media_prompts().encoder(view)
        return cls(view, sampling, environment, tokenizer, media, tokens, textless)

    @property
    def reward_calls(self) -> int:
        """Return the calls made so far; what an agent's own program calls is not known."""
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
        """Roll one group out; of an evaluation it also gets texts, and small copies of media.

        Raises:
            RolloutFailed: As ``offbeat.rollouts.group.run_group``.
        """
        receipt, columns = await self._rolled_out(task, failures, generate)
        if task.evaluation and self.tokenizer is not None:
            with environment_code(task):  # a tokenizer may come with the model, as code
                texts = response_texts(self.tokenizer, receipt, columns)
            receipt = msgspec.structs.replace(receipt, texts=texts)
        if task.evaluation:
            previews = media_log().previews(media_of(columns))
            receipt = msgspec.structs.replace(receipt, previews=previews)
        return receipt, columns

    async def _rolled_out(
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


def _exchange_with(
    engine: str, handle: Handle, worker: str, incarnation: str
) -> Exchange[GenerateRequest, GenerateResult]:
    async def exchange(
        requests: Sequence[tuple[int, GenerateRequest]],
        cancelled: Sequence[int],
        doubted: Sequence[int],
    ) -> Sequence[BatchedReply[GenerateResult]]:
        ref = handle.exchange.remote(worker, incarnation, requests, cancelled, doubted)
        return await reply_of(ref, engine, "generate")

    return exchange


def _as_failure(error: Exception) -> OffbeatError:
    """Return an error of ``_roll_out``, which is already typed; any other error is a bug here."""
    if isinstance(error, OffbeatError):
        return error
    return RemoteBug("environment worker", "rollout", type(error).__name__, first_line(error))


def classified(error: BaseException, task: RolloutTask) -> RolloutFailed:
    """Classify an error of a rollout by whether a retry may help. An unknown error is a bug."""
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
