"""Compares the journal's account of weights and engines with the engines' own records: I5, I6.

Checks fetches from several trainer ranks: none mixes releases, and each ends. I6, I7, I9.
"""

from typing import Final

from offbeat.config.limits import shares_weights
from offbeat.config.run import RunConfig
from offbeat.controller import events
from offbeat.plugins.simulation.audit_groups import AuditedGroups
from offbeat.plugins.simulation.audit_world import AuditTable, Findings, World
from offbeat.plugins.simulation.faults import KINDS
from offbeat.plugins.simulation.records import Ended, EngineDied, Fault, FetchBegan, FetchEnded

HARMLESS: Final = frozenset(name for name, kind in KINDS.items() if kind.profile == "trainer")
"""Trainer faults, which kill no engine process."""


class AuditedEngines(AuditTable):
    """Tracks which engines may receive work in this incarnation and lineage."""

    def __init__(
        self, config: RunConfig, groups: AuditedGroups, world: World, findings: Findings
    ) -> None:
        super().__init__(findings)
        self._shares_weights = shares_weights(config)  # then an engine ends with its trainer
        self._groups, self._world = groups, world
        self._served: dict[str, events.Served] = {}  # last ack by engine
        self._acked: set[tuple[str, str]] = set()  # engine incarnations that acked
        self._released: dict[int, str] = {}  # digest by version
        self._retired: set[str] = set()

    def on_opened(self, event: events.Opened) -> None:
        del event
        self._forget()

    def on_rewound(self, event: events.Rewound) -> None:
        self._forget()
        kept = {v: digest for v, digest in self._released.items() if v <= event.to_version}
        self._released = kept

    def on_retired(self, event: events.Retired) -> None:
        self._served.pop(event.engine, None)
        self._retired.add(event.engine)

    def on_lost(self, event: events.EngineLost) -> None:
        """Check that an engine is replaced only for a fault that can have hit it."""
        if self._world.faults.keys() <= HARMLESS and not self._shares_weights:
            self._add(
                "I17",
                f"{event.engine} was given up although no fault had struck an engine: {event.reason}",
            )

    def check_retired(self) -> None:
        """Check that a new controller knows every retired engine."""
        if unknown := self._world.retired - self._retired:
            names = ", ".join(sorted(unknown))
            self._add("I9", f"retired, and the journal does not know: {names}")

    def _forget(self) -> None:
        """Forget which weights engines served. Each must ack again before it receives work."""
        self._served.clear()
        self._acked.clear()

    def on_released(self, event: events.Released) -> None:
        if (event.version, event.digest) not in self._world.published:
            self._add(
                "I6",
                f"version {event.version} is released with digest {event.digest}; the trainer "
                "published none such",
            )
        if event.version > self._groups.version:
            self._add(
                "I5", f"version {event.version} is released at version {self._groups.version}"
            )
        self._released[event.version] = event.digest

    def on_served(self, event: events.Served) -> None:
        ack = event.engine, event.incarnation, event.epoch, event.version, event.digest
        if ack not in self._world.serves:
            self._add("I6", f"the ack {ack} is counted on; no such weights were served")
        if self._released.get(event.version) != event.digest:
            self._add(
                "I6",
                f"{event.engine} serves version {event.version} with digest {event.digest}; "
                f"released was {self._released.get(event.version)}",
            )
        if (event.engine, event.incarnation, event.epoch) in self._world.computes_other:
            self._add(
                "I6", f"the ack {ack} is counted on; what the engine computes with is not that"
            )
        before = self._served.get(event.engine)
        if (
            before is not None
            and before.incarnation == event.incarnation
            and event.version < before.version
        ):
            self._add(
                "I5", f"{event.engine} went from version {before.version} back to {event.version}"
            )
        self._served[event.engine] = event
        self._acked.add((event.engine, event.incarnation))

    def on_dispatched(self, event: events.Dispatched) -> None:
        served = self._served.get(event.engine)
        if served is None:
            self._add(
                "I6",
                f"group {event.prompt_index} goes to {event.engine}, which has acked nothing since this "
                "controller or this lineage began",
            )
        elif served.version != event.version:
            self._add(
                "I6",
                f"group {event.prompt_index} goes to {event.engine} as version {event.version}; it acked "
                f"{served.version}",
            )

    def on_committed(self, event: events.Committed) -> None:
        receipt, add = event.receipt, self._add
        row = self._groups.rows[receipt.prompt_index]
        name = f"group {receipt.prompt_index} attempt {receipt.attempt}"
        engine_process = receipt.engine, receipt.engine_incarnation
        answers = self._world.answers.get(
            (receipt.prompt_index, receipt.attempt, *engine_process), ()
        )
        if all(answer.spans != receipt.version_spans for answer in answers):
            add("I6", f"{name} is committed with {receipt.version_spans}; no worker sent that")
        if receipt.engine != row.engine:
            add("I6", f"{name} was dispatched to {row.engine} and comes from {receipt.engine}")
        elif engine_process not in self._acked:
            add("I6", f"{name} comes from {engine_process}, which acked no weights")
        if row.oldest < row.version:
            add("I6", f"{name} has tokens of version {row.oldest}; its engine had {row.version}")
        if row.newest > self._groups.version:
            add(
                "I4",
                f"{name} has tokens of version {row.newest}; the trainer is at "
                f"{self._groups.version}",
            )


_TRANSFER_S: Final = 4.0
"""Seconds that the buckets themselves may need. A load needs half a second on average."""

_FREEZES: Final = "engine_frozen"

Key = tuple[str, str, int]
"""Engine, incarnation and epoch."""


class AuditedFetches(AuditTable):
    """Follows each fetch of each engine, according to the engines' own records."""

    def __init__(self, config: RunConfig, findings: Findings) -> None:
        super().__init__(findings)
        self._limit_s = config.sync.deadline_s + _TRANSFER_S
        self._open = dict[Key, FetchBegan]()
        self._frozen = set[str]()  # engines that may freeze for long; empty name: any engine

    def on_fault(self, record: Fault) -> None:
        if record.kind == _FREEZES:
            self._frozen.add(record.target)

    def on_began(self, record: FetchBegan) -> None:
        self._open[record.engine, record.incarnation, record.epoch] = record

    def on_ended(self, record: FetchEnded) -> None:
        began = self._open.pop((record.engine, record.incarnation, record.epoch))
        self._check_wait(began, record.at)
        if record.problem:
            return
        if len(record.contents) != 1:
            self._add(
                "I7",
                f"{record.engine} loads version {began.version} of buckets that are of "
                f"{len(record.contents)} releases: {', '.join(record.contents)}",
            )
        elif record.contents[0] != began.digest:
            self._add(
                "I6",
                f"{record.engine} loads release {record.contents[0]} as version {began.version}, "
                f"which is {began.digest}",
            )

    def on_died(self, record: EngineDied) -> None:
        for key in [key for key in self._open if key[:2] == (record.engine, record.incarnation)]:
            del self._open[key]

    def on_end(self, record: Ended) -> None:
        """Check the fetches that are open at the end of the episode."""
        for began in self._open.values():
            self._check_wait(began, record.at)

    def _check_wait(self, began: FetchBegan, until_s: float) -> None:
        waited_s = until_s - began.at
        if waited_s > self._limit_s and not self._frozen & {began.engine, ""}:
            self._add(
                "I9",
                f"{began.engine} waits for version {began.version} for {waited_s:.1f} s; a fetch is "
                f"over after {self._limit_s:g} s",
            )
