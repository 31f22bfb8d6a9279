"""Checks the cost of a dead machine: I17.

Only groups whose payload was on it, and nowhere else, are rolled out again.
"""

from typing import Final

from offbeat.controller.events import Returned
from offbeat.simulation.audit_findings import Findings
from offbeat.simulation.audit_world import World

PAYLOAD_LOST: Final = "payload_lost"


class Losses:
    """Compares what the journal gives up as lost with what was lost by the actors' word."""

    def __init__(self, world: World, findings: Findings) -> None:
        self._world, self._findings = world, findings

    def returned(self, event: Returned) -> None:
        """A group is rolled out again. With a former controller all of its payloads are lost."""
        if event.reason != PAYLOAD_LOST or event.kind == "recovered":
            return
        if (event.prompt_index, event.attempt) not in self._world.lost_payloads:
            self._findings.add(
                "I17",
                f"attempt {event.attempt} of group {event.prompt_index} is rolled out again as lost; no "
                "machine was lost that alone held its payload",
            )
