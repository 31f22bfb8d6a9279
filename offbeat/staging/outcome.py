"""Outcomes of staging, one per node, and their table."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from offbeat.messages.failures import OffbeatError
from offbeat.staging.watchdog import Stalled

_MIB: Final = 2**20


class StagingVerdict(enum.StrEnum):
    """Kinds of ends of staging on one node."""

    COPIED = "copied"  # whole: some files were copied, each compared with its digest
    KEPT = "kept"  # whole: all files were there, each compared with its digest
    NO_ROOM = "no room"
    FOREIGN_FILES = "foreign files"
    IN_USE = "in use"
    SOURCE_CHANGED = "source changed"
    FAILED = "failed"  # of a disk or the network
    STALLED = "stalled"
    LOST = "lost"  # the process or the node


WHOLE: Final = frozenset({StagingVerdict.COPIED, StagingVerdict.KEPT})


@dataclass(frozen=True, slots=True)
class NodeOutcome:
    """Outcome of staging on one node."""

    verdict: StagingVerdict
    kept_files: int = 0
    copied_files: int = 0
    copied_bytes: int = 0
    problem: str = ""

    @property
    def is_whole(self) -> bool:
        """Return whether the node has the model."""
        return self.verdict in WHOLE


def as_node_outcome(outcome: NodeOutcome | Stalled | OffbeatError) -> NodeOutcome:
    """Return the row of a node in the table."""
    if isinstance(outcome, NodeOutcome):
        return outcome
    if isinstance(outcome, Stalled):
        problem = f"{outcome}. Look at its disk and its network, and stage again"
        return NodeOutcome(StagingVerdict.STALLED, problem=problem)
    problem = f"{outcome}. Bring the node back, and stage again"
    return NodeOutcome(StagingVerdict.LOST, problem=problem)


def table_of(outcome_by_node: Mapping[str, NodeOutcome]) -> str:
    """Format a row per node, and below them the problem of each node that lacks the model."""
    width = max(len("node"), *(len(node) for node in outcome_by_node))
    lines = [f"{'node':<{width}}  {'verdict':<14}  {'kept':>5}  {'copied':>6}  {'MiB':>10}"]
    lines += [
        f"{node:<{width}}  {each.verdict:<14}  {each.kept_files:>5}  {each.copied_files:>6}  "
        f"{each.copied_bytes / _MIB:>10,.1f}"
        for node, each in outcome_by_node.items()
    ]
    lines += [f"{node}: {each.problem}" for node, each in outcome_by_node.items() if each.problem]
    return "".join(f"{line}\n" for line in lines)
