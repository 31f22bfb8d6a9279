"""Plays one episode: a whole run from a seed, over all incarnations of its controller."""

import hashlib
import random
from typing import Final

import msgspec

from offbeat.config.run import RunConfig
from offbeat.controller.controller import Controller
from offbeat.controller.events import AnyEvent, Opened, StepApplied, StepIntent
from offbeat.plugins.simulation.cluster import Cluster
from offbeat.plugins.simulation.context import SimulationContext
from offbeat.plugins.simulation.draws import EpisodePlan, draw_plan
from offbeat.plugins.simulation.faults import Faults
from offbeat.plugins.simulation.loop import Deadlock, OutOfBounds, VirtualLoop
from offbeat.plugins.simulation.machines import Machines
from offbeat.plugins.simulation.network import SimulatedNetwork
from offbeat.plugins.simulation.records import (
    ControllerEnd,
    Ended,
    Fault,
    TrainerApplied,
    WorldRecord,
)
from offbeat.plugins.simulation.schedule import PlannedFault

MAX_EVENTS: Final = 300_000
MAX_S: Final = 20_000.0


class EpisodeResult(msgspec.Struct, frozen=True):
    """The outcome and the records of one episode."""

    seed: int
    plan: EpisodePlan
    outcome: str  # outcome of the last controller; stuck: it did not end
    error: str
    events: int  # callbacks run
    virtual_s: float
    journal: list[AnyEvent]
    records: list[WorldRecord]
    fired: list[str]  # fault kinds, in order
    failpoints: list[str]  # failpoints reached at least once
    struck: list[str]  # failpoints at which a fault had an effect
    digest: str  # digest of journal and records: equal digests mean equal histories

    @property
    def weights(self) -> str:
        """Return the digest of the weights after the last applied step, empty without one."""
        applied = (each for each in reversed(self.records) if isinstance(each, TrainerApplied))
        return next((each.digest for each in applied), "")


def run_episode(
    seed: int,
    base: RunConfig,
    *,
    profile: str = "all",
    planned_faults: list[PlannedFault] | None = None,
) -> EpisodeResult:
    """Play an episode. Equal arguments give equal results, bit for bit.

    Args:
        seed: Seed of all random choices.
        base: Run from which the episode's settings are drawn.
        profile: Faults to draw: a name of ``offbeat.plugins.simulation.faults.PROFILES``.
        planned_faults: Play these faults instead of drawn ones.
    """
    return play(seed, draw_plan(seed, base, profile, planned_faults))


def play(
    seed: int, plan: EpisodePlan, controller_cls: type[Controller] = Controller
) -> EpisodeResult:
    """Play a plan with the random numbers of a seed. A test may substitute another controller."""
    records: list[WorldRecord] = []
    loop = VirtualLoop(random.Random(f"{seed}/loop"), max_events=MAX_EVENTS, max_s=MAX_S)
    rng = random.Random(f"{seed}/world")

    def fired(kind: str, target: str, detail: str) -> None:
        records.append(Fault(loop.time(), kind, target, detail))

    faults = Faults(plan.planned_faults, loop, fired)
    network = SimulatedNetwork(loop, rng, faults)
    machines = Machines(loop, plan.machines)
    context = SimulationContext(plan.config, loop, rng, faults, network, records, machines)
    context.source_layout = plan.source_layout
    cluster = Cluster(plan, context, rng, controller_cls)
    try:
        outcome, error = _run(loop, cluster, faults)
        records.append(_ended(loop, cluster, outcome))
        events, virtual_s = loop.events, loop.time()
    finally:
        loop.close()
    # The actors keep their lists until a garbage collection. The result must end with its user.
    journal, records_so_far = cluster.events.copy(), records.copy()
    cluster.events.clear()
    records.clear()
    return EpisodeResult(
        seed=seed,
        plan=plan,
        outcome=outcome,
        error=error,
        events=events,
        virtual_s=virtual_s,
        journal=journal,  # type: ignore[arg-type]
        records=records_so_far,
        fired=faults.fired,
        failpoints=faults.reached,
        struck=faults.struck,
        digest=_digest(journal, records_so_far),
    )


def _run(loop: VirtualLoop, cluster: Cluster, faults: Faults) -> tuple[str, str]:
    try:
        cluster.start_controller()
        faults.step(0)
        end: ControllerEnd = loop.run_until_complete(cluster.over)
    except (Deadlock, OutOfBounds) as stuck:
        return "stuck", f"{type(stuck).__name__}: {cluster.describe(stuck)}"
    return end.outcome, end.error


def _ended(loop: VirtualLoop, cluster: Cluster, outcome: str) -> Ended:
    rollouts, controller = cluster.latest.rollouts, cluster.latest.controller
    return Ended(
        at=loop.time(),
        outcome=outcome,
        running=rollouts.open if outcome != "stuck" else 0,
        unclosed=cluster.unclosed() if outcome != "stuck" else (),
        telemetry_lost=_telemetry_lost(cluster) if outcome != "stuck" else 0,
        evaluations_failed=controller.state.evaluation.failed_count if controller else 0,
    )


def _telemetry_lost(cluster: Cluster) -> int:
    """Count the steps that a controller applied without emitting metrics.

    The last step of an incarnation is exempt, and so is one intended by a former incarnation.
    """
    applied: dict[int, list[int]] = {}
    incarnation = intended_by = 0
    for event in cluster.events:
        if isinstance(event, Opened):
            incarnation = event.incarnation
        elif isinstance(event, StepIntent):
            intended_by = incarnation
        elif isinstance(event, StepApplied) and intended_by == incarnation:
            applied.setdefault(incarnation, []).append(event.version)
    lost = 0
    for simulated in cluster.controllers:
        versions = applied.get(simulated.incarnation, [])
        if simulated is not cluster.latest or cluster.over.result().outcome != "finished":
            versions = versions[:-1]
        lost += sum(version not in simulated.telemetry.emitted for version in versions)
    return lost


_ENCODER: Final = msgspec.msgpack.Encoder()


def _digest(journal: list[msgspec.Struct], records: list[WorldRecord]) -> str:
    whole = hashlib.blake2b(digest_size=16)
    whole.update(_ENCODER.encode(journal))
    whole.update(_ENCODER.encode(records))
    return whole.hexdigest()
