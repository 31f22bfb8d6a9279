"""The simulated cluster: actors, one controller after another, and their faults."""

import asyncio
import random
from functools import partial
from typing import Final

import msgspec

from offbeat.algorithms.advantages import AdvantageEstimator, estimator
from offbeat.config.limits import max_group_bytes
from offbeat.config.loss_spec import LossSpec
from offbeat.config.mixture import environment_weights, evaluation_sets
from offbeat.config.run import RunConfig
from offbeat.controller.controller import Controller
from offbeat.controller.errors import RunAborted, RunFailed
from offbeat.controller.events import Admitted
from offbeat.controller.ledger import Ledger
from offbeat.controller.ports import NoTrace, Ports, Prompts
from offbeat.environments.prompts import EnvironmentPrompts, MixedPrompts
from offbeat.messages.failures import Component
from offbeat.messages.fences import Fence
from offbeat.plugins.simulation.actor import Actor
from offbeat.plugins.simulation.context import SimulationContext
from offbeat.plugins.simulation.controller_ports import (
    Caller,
    SimulatedEvaluationLog,
    SimulatedGenerator,
    SimulatedJournal,
    SimulatedPrompts,
    SimulatedRollouts,
    SimulatedTelemetry,
    SimulatedTrainer,
    SpooledPayloads,
)
from offbeat.plugins.simulation.draws import EpisodePlan
from offbeat.plugins.simulation.engine import SLOW_FOR_S, FakeEngine
from offbeat.plugins.simulation.faults import KINDS, Effect
from offbeat.plugins.simulation.loop import Deadlock, VirtualLoop
from offbeat.plugins.simulation.network import DEATH_NOTICED_S, MACHINE_NOTICED_S
from offbeat.plugins.simulation.processes import OUTSIDE, Process
from offbeat.plugins.simulation.records import ControllerEnd, ControllerStarted, MachineLost
from offbeat.plugins.simulation.trainer import FakeTrainer
from offbeat.plugins.simulation.worker import FakeWorker
from offbeat.sampler.build import build_sampler

RUN_ID: Final = "simulated"
PARTITION_S: Final = 30.0
_OUTAGE_S: Final = (5.0, 60.0)  # duration of an outage of all environments
_FROZEN_S: Final = (2.0, 40.0)  # until a frozen actor resumes, unless it is replaced earlier
_SILENT_S: Final = 8.0  # the driver kills a controller that is silent this long
_REPLACED_S: Final = (0.5, 4.0)  # from the death of a controller to the next one


class SimulatedController:
    """One controller process with everything that belongs to it."""

    def __init__(
        self,
        context: SimulationContext,
        incarnation: int,
        events: list[msgspec.Struct],
        workers: list[FakeWorker],
    ) -> None:
        self.incarnation = incarnation
        self.process = Process(f"controller {incarnation}")
        self.caller = Caller(context, self.process, Fence(RUN_ID, incarnation))
        self.journal = SimulatedJournal(context, self.process, events)
        self.first_record = len(events)
        self.telemetry = SimulatedTelemetry(context)
        self.controller: Controller | None = None
        self.rollouts = SimulatedRollouts(self.caller, workers, self.buffer_use)

    def buffer_use(self) -> tuple[int, int]:
        """Return the groups with workers, ready or in training, and the bytes in the queue."""
        if self.controller is None:
            return 0, 0
        state = self.controller.state
        done = len(state.ledger.ready) + len(state.ledger.training)
        return self.rollouts.open + done, state.queue.bytes_held


class Cluster:
    """All processes of an episode."""

    def __init__(
        self,
        plan: EpisodePlan,
        context: SimulationContext,
        rng: random.Random,
        controller_cls: type[Controller] = Controller,
    ) -> None:
        self._controller_cls = controller_cls
        self._plan, self._context, self._rng = plan, context, rng
        self._loop: VirtualLoop = context.loop
        self.trainer = FakeTrainer(context, plan.config.groups_per_step)
        names = [f"generator-{index}" for index in range(plan.config.generator.engines)]
        self.engines = {name: FakeEngine(name, context) for name in names}
        self.workers = [
            FakeWorker(f"environment-{index}", context, self.engines)
            for index in range(plan.workers)
        ]
        for worker in self.workers:
            worker.sample_failures = plan.sample_failures
            worker.several_turns = plan.several_turns
            worker.spooled_share = (1.0 - plan.spool_loss) if plan.spools else 0.0
        actors: list[Actor] = [self.trainer, *self.engines.values(), *self.workers]
        self.actors = {actor.name: actor for actor in actors}
        self.events: list[msgspec.Struct] = []  # events of the journal that survived
        self.controllers: list[SimulatedController] = []
        self._drivers = 1
        self.over: asyncio.Future[ControllerEnd] = self._loop.create_future()
        context.faults.strike = self.strike

    @property
    def latest(self) -> SimulatedController:
        """The running controller, or the last one."""
        return self.controllers[-1]

    # --- controllers -----------------------------------------------------------------------------

    def start_controller(self) -> None:
        """Start a new incarnation, which continues from the journal."""
        simulated = SimulatedController(
            self._context, len(self.controllers) + 1, self.events, self.workers
        )
        self.controllers.append(simulated)
        self._context.record(ControllerStarted, simulated.incarnation)
        context = simulated.process.context
        self._loop.create_task(self._live(simulated), name="controller", context=context)

    async def _live(self, simulated: SimulatedController) -> None:
        outcome, error, cause = "finished", "", ""
        try:
            await self._controller(simulated).run()
        except RunFailed as failure:
            first = failure.causes[0]
            outcome = "aborted" if isinstance(first, RunAborted) else "failed"
            error, cause = str(failure), type(first).__name__
        except Exception as bug:  # noqa: BLE001 - whatever it is, the auditor wants to know
            outcome, error, cause = "failed", str(bug), type(bug).__name__
        if simulated.process.alive:
            end = ControllerEnd(self._loop.time(), simulated.incarnation, outcome, error, cause)
            self._context.records.append(end)
            if not self.over.done():
                self.over.set_result(end)

    def _controller(self, simulated: SimulatedController) -> Controller:
        context, caller, config = self._context, simulated.caller, self._plan.config
        ports = Ports(
            prompts=_prompts(config, self._plan.prompts),
            rollouts=simulated.rollouts,
            generators={
                name: SimulatedGenerator(caller, engine) for name, engine in self.engines.items()
            },
            trainer=SimulatedTrainer(caller, self.trainer),
            journal=simulated.journal,
            telemetry=simulated.telemetry,
            trace=NoTrace(),
            payloads=SpooledPayloads(caller),
            failpoints=caller.reach,
            evaluation=_evaluation_sets(config),
            scores=SimulatedEvaluationLog(context, simulated.process),
        )
        simulated.controller = self._controller_cls(
            config,
            caller.fence,
            ports,
            sampler=build_sampler(config.sampler, config.groups_per_step),
            advantages=_built_in_estimator(config),
            loss=LossSpec.of(config),
            max_group_bytes=max_group_bytes(config),
            rng=random.Random(f"{config.seed}/{simulated.incarnation}"),
            ledger=Ledger.fold(self.events) if self.events else None,  # type: ignore[arg-type]
            groups_per_turn=self._plan.groups_per_turn,
            driver=self._driver,
        )
        state = simulated.controller.state
        simulated.rollouts.report_reward_calls(state.reward_calls)
        simulated.rollouts.report_processes(
            partial(state.joined, Component.WORKER), state.worker_lost
        )
        return simulated.controller

    @property
    def _driver(self) -> str:
        return f"driver {self._drivers}"

    def _kill_controller(self) -> bool:
        """Kill the controller. A new one starts a little later."""
        if not self._end_controller():
            return False
        delay_s = self._rng.uniform(*_REPLACED_S)
        self._loop.run_in(delay_s, OUTSIDE, self.start_controller)
        return True

    def _end_controller(self) -> bool:
        latest = self.latest
        if not latest.process.alive or self.over.done():
            return False
        self._loop.kill(latest.process)
        latest.journal.cut(self._rng)
        self._context.lost_controllers.add(latest.incarnation)
        self._context.record(ControllerEnd, latest.incarnation, "killed")
        return True

    # --- faults ----------------------------------------------------------------------------------

    def strike(self, kind: str, target: str) -> bool:
        """Apply a fault, or return False if its target does not exist."""
        if self.over.done():
            return False
        whole = {
            "controller_killed": self._kill_controller,
            "controller_frozen": self._freeze_controller,
            "cluster_lost": self._lose_cluster,
            "outage": self._begin_outage,
            "prompt_hangs": partial(self._poison_a_prompt, "prompt_hangs"),
            "prompt_kills": partial(self._poison_a_prompt, "prompt_kills"),
        }
        if kind in whole:
            return whole[kind]()
        if KINDS[kind].target == "machine":
            return self._lose_machine(kind, target)
        if target and target not in self.actors:
            return False
        actor = self._victim(kind, target)
        match KINDS[kind].effect:
            case Effect.KILLS:
                return actor.die()
            case Effect.FREEZES:
                self._freeze(actor.process)
            case _ if kind == "partition":
                self._context.network.partition(actor.name, self._loop.time() + PARTITION_S)
            case _:
                self._hamper(self.engines[actor.name], kind)
        return actor.process.alive

    def _begin_outage(self) -> bool:
        self._context.out_of_service_until = self._loop.time() + self._rng.uniform(*_OUTAGE_S)
        return True

    def _poison_a_prompt(self, kind: str) -> bool:
        """Make one of the next prompts hang or kill each engine that receives it."""
        drawn = sum(isinstance(event, Admitted) for event in self.events)
        self._context.poison[drawn + self._rng.randrange(self._plan.config.groups_per_step)] = kind
        return True

    def _victim(self, kind: str, target: str) -> Actor:
        """Return the actor of this name. Without a name, return any to which this fault applies."""
        if target:
            return self.actors[target]
        applies_to = KINDS[kind].target
        if applies_to == "trainer":
            return self.trainer
        return self._rng.choice(
            list(self.engines.values()) if applies_to == "engine" else self.workers
        )

    def _hamper(self, engine: FakeEngine, kind: str) -> None:
        if kind == "engine_wedged":
            engine.wedge()
        elif kind == "engine_refuses":
            engine.refuses = True
        elif kind == "engine_flaps":
            engine.flaps = True
        elif kind == "loads_hang":
            engine.hangs_in_loads = True
        else:
            engine.slow_until = self._loop.time() + SLOW_FOR_S

    def _freeze(self, process: Process) -> None:
        self._loop.freeze(process)
        self._loop.run_in(self._rng.uniform(*_FROZEN_S), OUTSIDE, self._loop.thaw, process)

    def _freeze_controller(self) -> bool:
        process = self.latest.process
        if not process.alive:
            return False
        self._loop.freeze(process)
        self._loop.run_in(_SILENT_S, OUTSIDE, self._kill_if_alive, process)
        return True

    def _kill_if_alive(self, process: Process) -> None:
        if process is self.latest.process:
            self._kill_controller()

    def _lose_cluster(self) -> bool:
        """Kill every process at once, so that only the run directory is left.

        Start a new cluster.
        """
        if not self._end_controller():
            return False
        for actor in self.actors.values():
            actor.belong_to_another_driver()
        self._drivers += 1
        delay_s = 2 * self._rng.uniform(*_REPLACED_S)
        self._loop.run_in(delay_s, OUTSIDE, self.start_controller)
        return True

    def _lose_machine(self, kind: str, machine: str) -> bool:
        """Kill a machine or cut it off. It is given up and replaced when Ray reports it lost.

        Its actors do not return.
        """
        context, now = self._context, self._loop.time()
        machine = machine or next(iter(context.machines.mortal), "")
        names = context.machines.actors_on(machine)
        living = [self.actors[name] for name in names if self.actors[name].process.alive]
        if not living or context.machines.is_gone(context.machines.memory_of(living[0].name)):
            return False
        noticed_s = self._rng.uniform(*self._rng.choice(MACHINE_NOTICED_S))
        context.record(MachineLost, machine, tuple(names))
        context.machines.die(machine, now + noticed_s)
        processes = [(actor, actor.process) for actor in living]
        for actor in living:
            context.network.partition(actor.name, now + noticed_s)
            if kind == "machine_lost":
                actor.die(noticed_s + DEATH_NOTICED_S)
        self._loop.run_in(noticed_s, OUTSIDE, self._give_up, machine, processes)
        return True

    def _give_up(self, machine: str, living: list[tuple[Actor, Process]]) -> None:
        """Replace a machine, except for processes that were replaced meanwhile."""
        names = tuple(self._context.machines.actors_on(machine))
        self._context.record(MachineLost, machine, names)
        self._context.machines.replace(machine)
        for actor, process in living:
            if actor.process is process:
                actor.die()

    # --- at rest ---------------------------------------------------------------------------------

    def unclosed(self) -> tuple[str, ...]:
        """Return the live actors that the ended controller did not close."""
        closed = self.latest.caller.asked_to_close
        return tuple(
            name
            for name, actor in self.actors.items()
            if actor.process.alive and name not in closed
        )

    def describe(self, error: Exception | Deadlock) -> str:
        state = self.latest.controller.state if self.latest.controller else None
        return f"{error}; {state.ledger if state else 'no controller'}"


def _built_in_estimator(config: RunConfig) -> AdvantageEstimator:
    """Return the recipe's estimator, or grpo instead of user code, which is not loaded."""
    algorithm = config.algorithm
    name = "grpo" if algorithm.advantage_target else algorithm.advantage
    return estimator(name, pass_k=algorithm.pass_k)


def _prompts(config: RunConfig, count: int | None) -> SimulatedPrompts:
    """Return the training prompts, ``count`` in all, or endless ones if it is None."""
    weights = environment_weights(config)
    endless = {name: SimulatedPrompts(None) for name in weights}
    return SimulatedPrompts(count, MixedPrompts(endless, weights, config.seed) if weights else None)


def _evaluation_sets(config: RunConfig) -> dict[str, Prompts]:
    sets = evaluation_sets(config) if config.eval.interval else {}
    prompts = {name: SimulatedPrompts(each.prompts) for name, each in sets.items()}
    if not config.environments:
        return dict(prompts)
    return {name: EnvironmentPrompts(name, each) for name, each in prompts.items()}
