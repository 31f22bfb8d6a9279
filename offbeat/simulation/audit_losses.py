"""Checks of the cost of a dead machine: I17.

Only groups whose payload was on it, and nowhere else, may be rolled out again.
"""

from typing import Final

from offbeat.controller.events import Returned, ReturnKind
from offbeat.simulation.audit_findings import Findings
from offbeat.simulation.audit_world import World

PAYLOAD_LOST: Final = "payload_lost"


class Losses:
    """Compares the payloads that the journal gives up with those that the actors lost."""

    def __init__(self, world: World, findings: Findings) -> None:
        self._world, self._findings = world, findings

    def returned(self, event: Returned) -> None:
        """Check a returned group. If its controller has died, its payload is lost."""
        if event.reason != PAYLOAD_LOST or event.kind is ReturnKind.RECOVERED:
            return
        if (event.prompt_index, event.attempt) not in self._world.lost_payloads:
            self._findings.add(
                "I17",
                f"attempt {event.attempt} of group {event.prompt_index} is rolled out again as lost; no "
                "machine was lost that alone held its payload",
            )
