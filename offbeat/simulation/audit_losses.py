"""Checks of the cost of a dead machine: I17.

Only groups whose payload was on it, and nowhere else, may be rolled out again.
"""

from offbeat.controller.events import Returned, ReturnKind
from offbeat.simulation.audit_findings import Findings
from offbeat.simulation.audit_world import World


class Losses:
    """Compares the payloads that the journal gives up with those that the actors lost."""

    def __init__(self, world: World, findings: Findings) -> None:
        self._world, self._findings = world, findings

    def returned_from_ready(self, event: Returned) -> None:
        """Check a ready group that is rolled out again for a failure of the infrastructure.

        Nothing but the loss of its payload is such a failure. A group that a new controller returns
        is of another kind: its payload may have died with the former controller.
        """
        if event.kind is not ReturnKind.INFRASTRUCTURE:
            return
        if (event.prompt_index, event.attempt) not in self._world.lost_payloads:
            self._findings.add(
                "I17",
                f"attempt {event.attempt} of group {event.prompt_index} is rolled out again as lost; no "
                "machine was lost that alone held its payload",
            )
