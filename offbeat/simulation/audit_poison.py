"""Checks of the cost of a prompt that hangs or kills its engines: only its own retries, I3."""

from collections import Counter

from offbeat.config.run import RunConfig
from offbeat.controller.events import Returned, ReturnKind
from offbeat.simulation.audit_findings import Findings
from offbeat.simulation.audit_world import World


class Poison:
    """Counts the engines that were given a poison prompt, according to the workers' records."""

    def __init__(self, config: RunConfig, world: World, findings: Findings) -> None:
        self._config, self._world, self._findings = config, world, findings
        # Attempts that ended for other reasons, by prompt index
        self._not_its_fault = Counter[int]()

    def returned(self, event: Returned) -> None:
        self._not_its_fault[event.prompt_index] += event.kind is not ReturnKind.INFRASTRUCTURE

    def check(self) -> None:
        """Check the retries.

        Attempts that were cancelled, or lost with their controller, do not count.
        """
        controllers = len(self._world.controller_ends)  # each may have lost its last records
        for prompt_index, attempts in self._world.poisoned.items():
            allowed = self._config.rollout.infrastructure_retries + 1
            allowed += self._not_its_fault[prompt_index] + controllers
            if len(attempts) > allowed:
                self._findings.add(
                    "I3",
                    f"poison prompt {prompt_index} was given to engines {len(attempts)} times; its "
                    f"retries allow {allowed}",
                )
