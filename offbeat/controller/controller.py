"""Supervises the pumps of one training run.

    prompts -> rollout pump -> ledger -> train pump -> trainer version -> weight sync
                    ^                                                         |
                    +------------------- admission reopens -------------------+

    pump       waits for                          woken by
    rollout    room within ``max_staleness``      a served version, a trained or dropped group
    train      a chunk of ready groups            a committed group, the end of the prompts
    sync       a release                          the train pump, after a step
    engine     a reason to doubt its engine       a failed request, a background timer
    watchdog   a silence nobody accounts for      its background timer
    control    an abort                           ``abort()``

When the train pump returns, the run is over. When any pump raises, all are cancelled and the error
leaves ``Controller.run``. No pump polls; no pump catches what it cannot repair.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import NoReturn, ParamSpec

import structlog

from offbeat.config.run import RunConfig
from offbeat.controller.busy import Busy
from offbeat.controller.engines import EnginePump
from offbeat.controller.errors import RunAborted, RunFailed, RunStalled, leaves
from offbeat.controller.fleet import Fleet
from offbeat.controller.ledger import Ledger
from offbeat.controller.lifecycle import Phase
from offbeat.controller.measures import StepMeasures
from offbeat.controller.ports import Generator, Ports, Rollouts, Trainer
from offbeat.controller.progress import Progress
from offbeat.controller.rollouts import RolloutPump
from offbeat.controller.state import RunState
from offbeat.controller.syncing import WeightSync
from offbeat.controller.training import Advantages, TrainPump
from offbeat.messages.fences import Fence
from offbeat.messages.training import LossSpec
from offbeat.sampler.policy import Sampler

P = ParamSpec("P")
_GRACE_S = 1.0
log = structlog.stdlib.get_logger()


class Controller:
    """The only owner of run state. Actors are called and answer; they never call back."""

    def __init__(
        self,
        config: RunConfig,
        fence: Fence,
        ports: Ports,
        *,
        sampler: Sampler,
        advantages: Advantages,
        loss: LossSpec,
        max_group_bytes: int,
        rng: random.Random,
    ) -> None:
        """Make it on the event loop that will run it; the loop's clock is the run's."""
        self._config, self._ports = config, ports
        clock = asyncio.get_running_loop().time
        fleet = Fleet(ports.generators)
        busy = Busy(clock, fleet.engines)
        self.state = RunState(config, fence, Ledger(ports.journal.append), fleet, sampler, busy)
        self.progress = Progress(self.state, clock)
        self._sync = WeightSync(self.state, ports.trainer, ports.generators)
        self._rollout_pump = RolloutPump(
            self.state,
            ports.prompts,
            ports.rollouts,
            max_group_bytes=max_group_bytes,
            rng=rng,
        )
        self._train_pump = TrainPump(
            self.state,
            ports.trainer,
            self._sync,
            journal=ports.journal,
            advantages=advantages,
            loss=loss,
            on_step=self._step_done,
            evict_stale=self._rollout_pump.evict_stale,
        )
        self._engine_pumps = [
            EnginePump(self.state, generator, self._sync) for generator in ports.generators.values()
        ]
        self._cause: BaseException | None = None
        self._abort: RunAborted | None = None

    async def run(self, on_ended: Callable[[BaseException | None], None] = lambda _: None) -> None:
        """Train to the end. Every way out of here has closed the actors.

        Args:
            on_ended: Called once the outcome is known, with what will be raised, before actors are
                closed: that may take long, and the outcome should be on disk by then.

        Raises:
            RunFailed: A pump raised, or ``abort`` was called.
        """
        self.state.moved()
        raised: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as pumps:
                helpers = [
                    pumps.create_task(self._recorded(pump), name=name)
                    for name, pump in self._helpers().items()
                ]
                train = pumps.create_task(self._recorded(self._train), name="train pump")
                await self._outlive(train)
                for helper in helpers:
                    helper.cancel()
            self.state.enter(Phase.FINISHED)
        except BaseExceptionGroup as group:
            raised = self._ended(group)
            raise raised from group
        except asyncio.CancelledError as cancelled:
            raised = cancelled
            self.state.enter(Phase.ABORTED)
            raise
        finally:
            self.progress.ended()
            try:
                on_ended(raised)
            finally:
                await self._close()

    def stop(self) -> None:
        """End normally after the step in progress, with the groups it has claimed so far.

        Call from the event loop.
        """
        self.state.stopping = True
        self.state.moved()

    def abort(self, reason: str) -> None:
        """End now; groups in flight are lost. Call from the event loop."""
        self._abort = RunAborted(reason)
        self.state.moved()

    # --- pumps -----------------------------------------------------------------------------------

    def _helpers(self) -> dict[str, Callable[[], Awaitable[None]]]:
        pumps: dict[str, Callable[[], Awaitable[None]]] = {
            "rollout pump": self._rollout_pump.run,
            "sync pump": self._sync.run,
            "watchdog": self._watchdog,
            "control": self._control,
        }
        for name, pump in zip(self._ports.generators, self._engine_pumps, strict=True):
            pumps[f"engine {name}"] = pump.run
        return pumps

    async def _train(self) -> None:
        """Bring the trainer up, serve its first weights, train."""
        state = self.state
        answer = await state.call(
            "start of the trainer",
            on="its first answer (is there room for it in the cluster?)",
            deadline_s=self._config.trainer.start_deadline_s,
            reply=self._ports.trainer.state(state.fence),
        )
        log.info("trainer.ready", ranks=answer.ranks, parameters=answer.parameters)
        await self._sync.ask(state.ledger.trainer_version)
        await self._sync.settled()
        state.serving_since = asyncio.get_running_loop().time()
        state.enter(Phase.RUNNING)
        await self._train_pump.run()
        await self._save_model()

    async def _save_model(self) -> None:
        """Keep the trained model; a run without an applied step has none."""
        version, checkpoint = self.state.ledger.trainer_version, self._config.checkpoint
        if not (checkpoint.final and version):
            return
        with self.state.busy.saving():
            await self.state.call(
                f"checkpoint of step {version}",
                on="the trainer",
                deadline_s=checkpoint.deadline_s,
                reply=self._ports.trainer.save(self.state.fence, version),
            )

    async def _watchdog(self) -> NoReturn:
        state, limit = self.state, self._config.supervision.stall_timeout_s
        clock = asyncio.get_running_loop().time
        while True:
            # A call at its deadline ends by itself, and says more than a stall does.
            healthy_until = max(state.moved_at + limit, state.awaits.healthy_until + _GRACE_S)
            if (now := clock()) >= healthy_until:
                raise RunStalled(now - state.moved_at, self._where(), state.awaits.describe(now))
            await asyncio.sleep(healthy_until - now)  # the earliest moment of a stall

    async def _control(self) -> NoReturn:
        await self.state.changed.wait_for(lambda: self._abort is not None)
        raise self._abort or RunAborted("asked")

    def _step_done(self, measures: StepMeasures) -> None:
        busy = self.progress.step_done(measures)
        self._ports.telemetry.emit(measures.step, measures.version, {**measures.metrics(), **busy})

    def _where(self) -> str:
        state = self.state
        oldest = min(
            (group for group in state.ledger.groups.values() if group.engine),
            default=None,
            key=lambda group: group.ordinal,
        )
        held = f"; oldest group {oldest.ordinal} on {oldest.engine}" if oldest else ""
        return f"step {state.step}: {state.ledger}; engines: {state.fleet}{held}"

    # --- the end ---------------------------------------------------------------------------------

    async def _outlive(self, train: asyncio.Task[None]) -> None:
        """Return when ``train`` has ended. A cancel that no pump caused came from outside."""
        try:
            await asyncio.wait([train])
        except asyncio.CancelledError as cancelled:
            self._cause = self._cause or cancelled
            raise

    async def _recorded(
        self, pump: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Run ``pump``; its error goes on record before the task group cancels the others."""
        try:
            await pump(*args, **kwargs)
        except Exception as error:
            self._cause = self._cause or error
            raise

    def _ended(self, group: BaseExceptionGroup[BaseException]) -> BaseException:
        """Enter the last phase; the error that ``run`` raises."""
        cause, state = self._cause, self.state
        asked = isinstance(cause, RunAborted | asyncio.CancelledError)
        state.enter(Phase.ABORTED if asked else Phase.FAILED)
        if isinstance(cause, asyncio.CancelledError):
            return cause  # a cancel stays a cancel, whatever clean-up raised
        first = set(leaves(cause)) if cause is not None else set[BaseException]()
        causes = sorted(leaves(group), key=lambda each: each not in first)
        return RunFailed(state.lifecycle.phase, state.step, state.ledger.trainer_version, causes)

    async def _close(self) -> None:
        """Close every actor, all at once. A failure is logged: it must not hide why the run ended."""
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
