"""What every fake actor of an episode shares."""

import random

from offbeat.config.run import RunConfig
from offbeat.simulation.disk import Disk
from offbeat.simulation.faults import Faults
from offbeat.simulation.loop import VirtualLoop
from offbeat.simulation.network import Network
from offbeat.simulation.payloads import Payload
from offbeat.simulation.records import Record


class Surroundings:
    """Clock, dice, links, disk and the log of one episode."""

    def __init__(
        self,
        config: RunConfig,
        loop: VirtualLoop,
        rng: random.Random,
        faults: Faults,
        network: Network,
        records: list[Record],
    ) -> None:
        self.config, self.loop, self.rng = config, loop, rng
        self.faults, self.network, self.records = faults, network, records
        self.record = records.append
        self.disk = Disk(records, config.checkpoint.keep)
        self.lost_controllers: set[int] = set()  # incarnations whose memory is gone

    def is_gone(self, payload: Payload) -> bool:
        """It was in the memory of a controller that died, and nowhere else."""
        return payload.incarnation in self.lost_controllers and not payload.spooled
