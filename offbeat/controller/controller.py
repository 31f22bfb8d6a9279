"""Supervises the pumps of one training run.

    prompts -> rollout pump -> ledger -> train pump -> trainer version -> weight sync
                    ^                                                         |
                    +------------------- admission reopens -------------------+

    pump        waits for                          woken by
    rollout     room within ``max_staleness``      a served version, a trained or dropped group
    train       ready groups, trainer, journal     a committed or dropped group, replies, the disk
    sync        a version to publish, acks         the train pump, after a step; the engines
    evaluation  a version to score, an engine      the train pump, the engines
    engine      its first answer, then its loss    a failed request or sync, a probe timer
    watchdog    a time without progress            its background timer
    control     a command                          ``control()``

The run ends when the train pump returns. If a pump raises, all pumps are cancelled and
``Controller.run`` raises the error. No pump polls, and no pump catches an error that it cannot fix.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn, ParamSpec

import structlog

from offbeat.config.loss_spec import LossSpec
from offbeat.config.run import RunConfig
from offbeat.controller.checkpoints import Checkpoints
from offbeat.controller.commands import Abort, Command, Pause, Resume, Stop
from offbeat.controller.engines import EnginePump
from offbeat.controller.errors import (
    BudgetSpent,
    EngineNotStarted,
    RunAborted,
    RunFailed,
    RunStalled,
    TrainerBudgetSpent,
    leaves,
)
from offbeat.controller.evaluation import Evaluation
from offbeat.controller.group_moves import Place
from offbeat.controller.ledger import Ledger
from offbeat.controller.lifecycle import RunPhase
from offbeat.controller.ports import Generator, Ports, Rollouts, Trainer
from offbeat.controller.progress import Progress
from offbeat.controller.recovery import GROUPS_PER_TURN, Recovery
from offbeat.controller.retries import RetryPolicy
from offbeat.controller.rollouts import RolloutPump
from offbeat.controller.state import RunState
from offbeat.controller.step_metrics import StepMetricsBuilder
from offbeat.controller.syncing import WeightSync
from offbeat.controller.train_step import Advantages, TrainStep
from offbeat.controller.trainer_client import TrainerClient
from offbeat.controller.training import TrainPump
from offbeat.messages.failures import Component, OffbeatError
from offbeat.messages.fences import Fence
from offbeat.messages.groups import group_id
from offbeat.sampler.policy import Sampler

P = ParamSpec("P")
_GRACE_S: Final = 1.0
_LAST_SAVE_S: Final = 30.0  # after a failure, the maximum time for a last checkpoint
_MOMENT_S: Final = 1.0  # for the end of a step, where there are no checkpoints to have it in
_SHARE_OF_GRACE: Final = 0.7  # for a last checkpoint; the rest is for closing the actors
_LOOK_S: Final = 10.0  # interval of the watchdog
# Checks in a row without work in progress or a change. One proves nothing: between two callbacks
# nothing is in progress either.
_DEADLOCK_LOOKS: Final = 2
log = structlog.stdlib.get_logger()


class Controller:
    """Owns all run state. Actors are called and reply, but never call back."""

    def __init__(  # noqa: PLR0913 - the seams of a run, by name
        self,
        config: RunConfig,
        fence: Fence,
        ports: Ports,
        *,
        sampler: Sampler,
        advantages: Advantages,
        advantages_within_s: float | None = None,
        loss: LossSpec,
        max_group_bytes: int,
        rng: random.Random,
        ledger: Ledger | None = None,
        driver: str = "",
        groups_per_turn: int = GROUPS_PER_TURN,
        evaluates_only: bool = False,
        spares_prompts: bool = False,
    ) -> None:
        """Create the controller on the event loop that runs it.

        All its times are read from that loop's clock.

        Args:
            config: Recipe of the run.
            fence: Run id and incarnation of this controller. Actors refuse lower incarnations.
            ports: Everything outside the controller.
            sampler: The staleness policy.
            advantages: Function from the rewards of a group to its samples' advantages.
            advantages_within_s: Seconds that it may block for a chunk, or None if it never blocks.
            loss: Loss of every step.
            max_group_bytes: Maximum bytes that one group's columns can have.
            rng: Random numbers for the jitter of back-offs.
            ledger: State that results from the journal, if the run has had a controller before.
            driver: Name of the process that started this incarnation, for the journal.
            groups_per_turn: Groups that a rewind returns between two turns of the event loop.
            evaluates_only: True if nothing is trained. Then evaluations may use every engine.
            spares_prompts: True if evaluations tolerate prompts whose samples all failed.
        """
        self._config, self._ports, self._driver = config, ports, driver
        state = self.state = RunState(config, fence, ports, sampler, ledger or Ledger())
        self.progress = Progress(state, asyncio.get_running_loop().time)
        self._trainer_client = TrainerClient(state, ports.trainer)
        self._sync = sync = WeightSync(state, self._trainer_client, ports.generators)
        retries = RetryPolicy(state, rng)
        self._rollout_pump = RolloutPump(
            state, ports.prompts, ports.rollouts, retries, max_group_bytes=max_group_bytes
        )
        self._evaluation = Evaluation(
            state,
            ports.evaluation,
            ports.rollouts,
            ports.telemetry,
            ports.scores,
            on_all_engines=evaluates_only,
            spares_prompts=spares_prompts,
        )
        self._recovery = self._new_recovery(groups_per_turn)
        step = TrainStep(
            state,
            self._trainer_client,
            sync,
            advantages=advantages,
            advantages_within_s=advantages_within_s,
            loss=loss,
        )
        self._train_pump = self._new_train_pump(step)
        self._engine_pumps = [EnginePump(state, each, sync) for each in ports.generators.values()]
        self._cause: BaseException | None = None
        self._keep_until = 0.0  # once aborted: when a last checkpoint is given up

    def _new_recovery(self, groups_per_turn: int) -> Recovery:
        return Recovery(
            self.state,
            self._trainer_client,
            self._sync,
            self._rollout_pump,
            self._ports.payloads,
            groups_per_turn=groups_per_turn,
        )

    def _new_train_pump(self, step: TrainStep) -> TrainPump:
        return TrainPump(
            self.state,
            self._trainer_client,
            step,
            self._sync,
            self._rollout_pump,
            recovery=self._recovery,
            checkpoints=Checkpoints(self.state, self._trainer_client),
            evaluation=self._evaluation,
            on_step=self._step_done,
        )

    async def run(
        self, on_ended: Callable[[BaseException | None], bool | None] = lambda _: None
    ) -> None:
        """Train to the end. The actors are closed on return, even after an error.

        Args:
            on_ended: Called before the actors are closed, with the error that will be raised, or
                None. It writes the outcome to disk, because closing the actors may be slow. It
                returns True if a newer controller owns the run. Then the run's checkpoints and
                actors stay untouched.

        Raises:
            RunFailed: A pump raised, or ``abort`` was called.
        """
        raised: BaseException | None = None
        try:
            await self._open()
            self._leave_out_retired_engines()
            async with asyncio.TaskGroup() as pumps:
                helpers = [
                    pumps.create_task(self._run_pump(pump), name=name)
                    for name, pump in self._helpers().items()
                ]
                train = pumps.create_task(self._run_pump(self._train_pump.run), name="train pump")
                await self._outlive(train)
                for helper in helpers:
                    helper.cancel()
            self.state.lifecycle.enter(RunPhase.FINISHED)
        except BaseExceptionGroup as group:
            raised = self._conclude(group)
            raise raised from group
        except asyncio.CancelledError as cancelled:
            raised = cancelled
            self.state.lifecycle.enter(RunPhase.ABORTED)
            raise
        except OffbeatError as failure:
            raised = self._conclude(BaseExceptionGroup("journal", [failure]))
            raise raised from failure
        finally:
            self.progress.ended()
            is_replaced = False
            try:
                is_replaced = bool(on_ended(raised))
            finally:
                if not is_replaced:
                    try:
                        await self._keep_state()
                    finally:
                        await self._close()

    def control(self, command: Command) -> None:
        """Execute an operator's command: pause, resume, stop or abort.

        Call it from the event loop.
        """
        self.state.operator.send(command)

    def abort(self, reason: str) -> None:
        """End now. Groups in flight are lost. Call from the event loop."""
        self.control(Abort(reason))

    async def _open(self) -> None:
        """Record the start of this incarnation durably before any actor is called."""
        state = self.state
        state.ledger.open(state.fence.run_id, state.fence.incarnation, self._driver)
        await state.waits.durable(f"beginning of incarnation {state.fence.incarnation}")

    def _leave_out_retired_engines(self) -> None:
        """Skip the engines that a former controller has retired."""
        fleet = self.state.fleet
        for name in self.state.costs.retired:
            fleet.dead(name)
            fleet.retire(name)
            self._sync.canaries.retired(name)

    # --- pumps -----------------------------------------------------------------------------------

    def _helpers(self) -> dict[str, Callable[[], Awaitable[None]]]:
        pumps: dict[str, Callable[[], Awaitable[None]]] = {
            "rollout pump": self._rollout_pump.run,
            "sync pump": self._sync.run,
            "evaluation pump": self._evaluation.run,
            "watchdog": self._watchdog,
            "control": self._control,
        }
        for name, pump in zip(self._ports.generators, self._engine_pumps, strict=True):
            pumps[f"engine {name}"] = pump.run
        return pumps

    async def _watchdog(self) -> NoReturn:
        """End a deadlocked run at once. End any other run after too long without progress."""
        state, waits = self.state, self.state.waits
        limit = self._config.supervision.stall_timeout_s
        clock = asyncio.get_running_loop().time
        seen, looks = -1.0, 0
        while True:
            now, busy_until = clock(), waits.healthy_until
            # A call at its deadline ends by itself, with a more specific error than a stall.
            stuck = now >= max(waits.changed_at + limit, busy_until + _GRACE_S)
            nobody_acts = busy_until == -float("inf") and seen == waits.changed_at
            looks = looks + 1 if nobody_acts else 0
            if (stuck or looks == _DEADLOCK_LOOKS) and not state.operator.is_paused:
                raise RunStalled(now - waits.changed_at, self._where(), waits.describe(now))
            seen = waits.changed_at
            await asyncio.sleep(min(_LOOK_S, limit))
            # A run without progress, even a paused one, leaves no unwritten records.
            await waits.call(
                "watchdog",
                target="the journal",
                component=Component.JOURNAL,
                deadline_s=limit,
                reply=state.journal.barrier(),
                background=True,
            )

    async def _control(self) -> NoReturn:
        """Execute the operator's commands from the inbox."""
        operator = self.state.operator
        while True:
            await self.state.waits.wait_unlisted(operator.has_command)
            command = operator.next_command()
            log.info("run.command", command=type(command).__name__)
            match command:
                case Pause():
                    operator.pause()
                case Resume():
                    operator.resume()
                case Stop(reason=reason):
                    operator.stop(reason)
                case Abort():
                    await self._wait_for_open_step()
                    raise RunAborted(command.reason)

    async def _wait_for_open_step(self) -> None:
        """Wait for the step in progress to finish, within the time reserved for a last checkpoint.

        Otherwise the trainer could have applied a step that the ledger does not know, and no
        checkpoint could be trusted.
        """
        state, clock = self.state, asyncio.get_running_loop().time
        grace_s = _SHARE_OF_GRACE * self._config.supervision.signal_grace_s
        self._keep_until = clock() + grace_s
        within_s = grace_s if self._config.checkpoint.interval else min(grace_s, _MOMENT_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await state.waits.wait_unlisted(lambda: state.ledger.intent is None)

    def _step_done(self, measures: StepMetricsBuilder) -> None:
        metrics = self.progress.step_done(measures)
        self._ports.telemetry.emit(measures.step, measures.version, metrics, measures.samples)

    def _where(self) -> str:
        state = self.state
        oldest = min(
            (group for group in state.ledger.groups.values() if group.place is Place.IN_FLIGHT),
            default=None,
            key=lambda group: group.prompt_index,
        )
        oldest_in_flight = (
            f"; oldest in flight {group_id(oldest.prompt_index)} on {oldest.engine}"
            if oldest
            else ""
        )
        return f"step {state.step}: {state.ledger}; engines: {state.fleet}{oldest_in_flight}"

    # --- the end ---------------------------------------------------------------------------------

    async def _outlive(self, train: asyncio.Task[None]) -> None:
        """Wait until ``train`` has ended.

        If no pump caused its cancellation, the cancellation came from outside.
        """
        try:
            await asyncio.wait([train])
        except asyncio.CancelledError as cancelled:
            self._cause = self._cause or cancelled
            raise

    async def _run_pump(
        self, pump: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Run ``pump``. Record its error before the task group cancels the other pumps."""
        try:
            await pump(*args, **kwargs)
        except Exception as error:
            self._cause = self._cause or error
            raise

    def _conclude(self, group: BaseExceptionGroup[BaseException]) -> BaseException:
        """Enter the last phase, and return the error that ``run`` raises."""
        cause, state = self._cause, self.state
        is_requested = isinstance(cause, RunAborted | asyncio.CancelledError)
        state.lifecycle.enter(RunPhase.ABORTED if is_requested else RunPhase.FAILED)
        if isinstance(cause, asyncio.CancelledError):
            return cause  # stays a cancellation, even if clean-up raised
        first = set(leaves(cause)) if cause is not None else set[BaseException]()
        causes = sorted(leaves(group), key=lambda each: each not in first)
        return RunFailed(state.lifecycle.phase, state.step, state.ledger.trainer_version, causes)

    async def _keep_state(self) -> None:
        """Save a checkpoint of a run that ends early, if its trainer is healthy."""
        # A pump with subtasks raises an exception group.
        match self._cause and next(leaves(self._cause)):
            case RunAborted():
                within_s = self._keep_until - asyncio.get_running_loop().time()
                await self._train_pump.keep_state(within_s)
            case TrainerBudgetSpent():
                pass
            case BudgetSpent() | EngineNotStarted():
                await self._train_pump.keep_state(_LAST_SAVE_S)
            case _:
                pass

    async def _close(self) -> None:
        """Close all actors concurrently.

        Failures are logged: they must not hide why the run ended.
        """
        actors = (self._ports.rollouts, *self._ports.generators.values(), self._ports.trainer)
        async with asyncio.TaskGroup() as closing:
            for actor in actors:
                closing.create_task(self._close_one(actor), name="close")

    async def _close_one(self, actor: Rollouts | Generator | Trainer) -> None:
        try:
            async with asyncio.timeout(self._config.supervision.shutdown_timeout_s):
                await actor.close()
        except Exception:
            log.exception("actor.close_failed", actor=type(actor).__name__)
