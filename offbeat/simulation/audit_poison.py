"""Checks the cost of a prompt that hangs its engines or kills them: only its own retries, I3."""

from collections import Counter

from offbeat.config.run import RunConfig
from offbeat.controller.events import Returned
from offbeat.messages.failures import FailureKind
from offbeat.simulation.audit_findings import Findings
from offbeat.simulation.audit_world import World


class Poison:
    """Counts the engines that were given a poison prompt, by the workers' own records."""

    def __init__(self, config: RunConfig, world: World, findings: Findings) -> None:
        self._config, self._world, self._findings = config, world, findings
        self._not_its_fault = Counter[
            int
        ]()  # attempts that ended for other reasons, by prompt index

    def returned(self, event: Returned) -> None:
        self._not_its_fault[event.prompt_index] += event.kind != FailureKind.INFRASTRUCTURE

    def check(self) -> None:
        """An attempt that was cancelled, or whose controller died, is no failure of the prompt."""
        lives = len(self._world.lives)  # each may have lost its last records
        for prompt_index, attempts in self._world.poisoned.items():
            allowed = self._config.rollout.infrastructure_retries + 1
            allowed += self._not_its_fault[prompt_index] + lives
            if len(attempts) > allowed:
                self._findings.add(
                    "I3",
                    f"poison prompt {prompt_index} was given to engines {len(attempts)} times; its "
                    f"retries allow {allowed}",
                )
