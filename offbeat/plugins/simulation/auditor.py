"""Audits a whole run independently and reports every violated invariant.

It reads only the journal and the actors' records. It shares no code with the ledger, the fleet or
the samplers, so it does not repeat their mistakes.

    records -> World    history according to the actors
    journal -> Groups   where every group is           I1 I3 I4 I8 I11
               Steps    trained groups                 I2 I5 I7 I12
        AuditedEngines  served weights                 I5 I6
    both    -> End      how it ended                   I3 I8 I9 I14 I15 I16
               Losses   cost of a lost machine         I17
               Samples  each sample once, masked ones nowhere  I18
        AuditedRewards  calls of reward functions      I20
        EngineRestarts  faults that explain restarts   I21
        AuditedWorkers  workers that were lost         I23
        Survivors  work while a machine is lost        I24
    records -> AuditedTurns  decode steps and changes of shared weights  I25

Each part is a table that names the classes it reads. All records are read before the journal.
``audit_aggregates`` checks I22 separately, in some of the episodes.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from math import gcd
from typing import Any, Final

from offbeat.config.run import RunConfig
from offbeat.controller.events import (
    AnyEvent,
    Committed,
    Returned,
    ReturnKind,
    Spent,
    TrainerReplaced,
)
from offbeat.plugins.simulation.audit_end import End
from offbeat.plugins.simulation.audit_engines import AuditedEngines, AuditedFetches
from offbeat.plugins.simulation.audit_evaluations import EvaluationAudit
from offbeat.plugins.simulation.audit_groups import AuditedGroups
from offbeat.plugins.simulation.audit_rewards import AuditedRewards, AuditedTurns
from offbeat.plugins.simulation.audit_samples import AuditedSamples
from offbeat.plugins.simulation.audit_steps import Steps
from offbeat.plugins.simulation.audit_survivors import Survivors
from offbeat.plugins.simulation.audit_workers import AuditedWorkers
from offbeat.plugins.simulation.audit_world import AuditTable, Findings, Violation, World
from offbeat.plugins.simulation.records import FenceRefused, WorldRecord

__all__ = ["Violation", "audit"]

_WITHOUT_RULE: Final = (FenceRefused, Spent, TrainerReplaced)
"""Classes that no table reads."""


class Environments(AuditTable):
    """Environment of every committed prompt, and prompts per environment in each cycle."""

    def __init__(self, config: RunConfig, findings: Findings) -> None:
        super().__init__(findings)
        weights = {name: each.weight for name, each in config.environments.items()} or {"": 1}
        divisor = reduce(gcd, weights.values())
        self._most = {name: weight // divisor for name, weight in weights.items()}
        self._cycle = sum(self._most.values())
        self._known = dict[int, str]()
        self._counts = Counter[tuple[int, str]]()  # prompts by cycle and environment

    def on_committed(self, event: Committed) -> None:
        """Check the environment of a group that was committed."""
        index, name = event.receipt.prompt_index, event.receipt.environment
        if name not in self._most:
            self._add("I19", f"group {index} is of environment {name!r}, which is none")
            return
        if index in self._known:  # committed before, by another attempt
            if self._known[index] != name:
                text = f"prompt {index} was of {self._known[index]!r}, and is of {name!r} now"
                self._add("I19", text)
            return
        self._known[index] = name
        cycle = index // self._cycle
        self._counts[cycle, name] += 1
        if self._counts[cycle, name] > self._most[name]:
            self._add(
                "I19",
                f"{self._counts[cycle, name]} of the {self._cycle} prompts from "
                f"{cycle * self._cycle} on are of {name!r}; its weight is {self._most[name]}",
            )


class Losses(AuditTable):
    """Compares the payloads that the journal gives up with the payloads that the actors lost: I17.

    A ready group may be rolled out again only if a dead machine held its only payload.
    """

    def __init__(self, groups: AuditedGroups, world: World, findings: Findings) -> None:
        super().__init__(findings)
        self._groups, self._world = groups, world

    def on_returned(self, event: Returned) -> None:
        """Check a ready group that is rolled out again for a failure of the infrastructure.

        Only the loss of its payload is such a failure. A group that a new controller returns is of
        another kind, because its payload may have died with the former controller. This runs before
        the table of groups moves the group.
        """
        key = event.prompt_index, event.attempt
        is_failure = event.kind is ReturnKind.INFRASTRUCTURE
        if is_failure and self._groups.is_ready(key[0]) and key not in self._world.lost_payloads:
            self._add(
                "I17",
                f"attempt {event.attempt} of group {event.prompt_index} is rolled out again as lost; no "
                "machine was lost that alone held its payload",
            )


class Poison(AuditTable):
    """Counts the engines that received a poison prompt, according to the workers' records."""

    def __init__(self, config: RunConfig, world: World, findings: Findings) -> None:
        super().__init__(findings)
        self._config, self._world = config, world
        # Attempts that ended for other reasons, by prompt index
        self._not_its_fault = Counter[int]()

    def on_returned(self, event: Returned) -> None:
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
                self._add(
                    "I3",
                    f"poison prompt {prompt_index} was given to engines {len(attempts)} times; its "
                    f"retries allow {allowed}",
                )


def audit(
    journals: Sequence[AnyEvent],
    records: Sequence[WorldRecord],
    config: RunConfig,
    *,
    prompts: int | None = None,
) -> list[Violation]:
    """Return every violation that journal and records show, the first cause first.

    Args:
        journals: The part of the journal that survived, oldest first, over all incarnations of the
            controller.
        records: Records of the actors, in order of events.
        config: Config of the run.
        prompts: Number of rows of the prompt source, or None if it is endless or unknown.
    """
    findings = Findings()
    world, fetches = World(config, findings), AuditedFetches(config, findings)
    evaluations = EvaluationAudit(config, findings)
    groups = AuditedGroups(config, prompts, findings)
    samples = AuditedSamples(config, groups, world, findings)
    steps = Steps(config, groups, samples, world, findings)
    engines = AuditedEngines(config, groups, world, findings)
    poison = Poison(config, world, findings)
    rewards = AuditedRewards(config, groups, findings)
    before_moves = Losses(groups, world, findings), Environments(config, findings), samples
    after_moves = steps, AuditedWorkers(findings), rewards, engines, poison
    tables = (
        world,
        fetches,
        evaluations,
        AuditedTurns(findings),
        *before_moves,
        groups,
        *after_moves,
    )
    _read("records", records, tables, findings)
    _read("journal", journals, tables, findings)
    poison.check()
    engines.check_retired()
    steps.check_trainer()
    findings.source, findings.index = "end", len(records)
    rewards.check_end()
    Survivors(config, records, findings).check()
    End(config, groups, steps, world, evaluations, rewards, findings).check()
    return findings.violations


def _read(
    source: str,
    events: Sequence[AnyEvent] | Sequence[WorldRecord],
    tables: Sequence[AuditTable],
    findings: Findings,
) -> None:
    """Pass each event or record to the tables that read its class, in the order of the tables."""
    handlers: dict[type[Any], list[Callable[[Any], None]]] = {kind: [] for kind in _WITHOUT_RULE}
    for table in tables:
        for kind, handle in table.list_readers():
            handlers.setdefault(kind, []).append(handle)
    findings.source = source
    for findings.index, event in enumerate(events):
        findings.current = event
        for handle in handlers[type(event)]:
            handle(event)
