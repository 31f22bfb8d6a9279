"""State shared by all fake actors of an episode."""

import random
from collections.abc import Callable
from typing import Concatenate, ParamSpec

from offbeat.config.run import RunConfig
from offbeat.plugins.simulation.disk import SimulatedDisk, SimulatedPayload
from offbeat.plugins.simulation.faults import Faults
from offbeat.plugins.simulation.loop import VirtualLoop
from offbeat.plugins.simulation.machines import Machines
from offbeat.plugins.simulation.network import SimulatedNetwork
from offbeat.plugins.simulation.records import WorldRecord
from offbeat.plugins.simulation.shared_weights import SharedWeights
from offbeat.plugins.simulation.source_layout import SourceLayout

P = ParamSpec("P")


class SimulationContext:
    """Clock, random numbers, network, disk and records of one episode."""

    def __init__(
        self,
        config: RunConfig,
        loop: VirtualLoop,
        rng: random.Random,
        faults: Faults,
        network: SimulatedNetwork,
        records: list[WorldRecord],
        machines: Machines | None = None,
    ) -> None:
        self.machines = machines or Machines(loop, {})
        self.config, self.loop, self.rng = config, loop, rng
        self.faults, self.network, self.records = faults, network, records
        self.disk = SimulatedDisk(self.record, config.checkpoint.keep)
        self.out_of_service_until = 0.0  # of all environments, in virtual seconds
        self.poison: dict[int, str] = {}  # effect of poison prompts, by prompt index
        self.source_layout = SourceLayout()
        self.shared_weights: SharedWeights | None = (
            None  # of the trainer; None: engines have copies
        )
        self.lost_controllers: set[int] = set()  # incarnations whose memory is lost

    def record(
        self,
        kind: Callable[Concatenate[float, P], WorldRecord],
        *fields: P.args,
        **named: P.kwargs,
    ) -> None:
        """Write a record of this moment."""
        self.records.append(kind(self.loop.time(), *fields, **named))

    def is_gone(self, payload: SimulatedPayload) -> bool:
        """Return whether the payload's controller, or the machine that stored it, is dead."""
        of_former = payload.incarnation in self.lost_controllers
        return of_former or self.machines.is_gone(payload.memory)
