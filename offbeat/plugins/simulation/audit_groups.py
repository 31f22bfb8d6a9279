"""The auditor's own table of prompt groups, from the journal only: I1 and its consequences.

It is deliberately naive: one row per group, and every move is checked against the row. An illegal
move is reported and then executed, so that one violation is not reported ten times.
"""

import math
from dataclasses import dataclass
from typing import Final

from offbeat.config.limits import max_outstanding_groups
from offbeat.config.run import RunConfig
from offbeat.config.sections.sampler import CustomSamplerConfig, InOrderConfig
from offbeat.controller import events
from offbeat.messages.failures import ENVIRONMENT_UNAVAILABLE
from offbeat.messages.groups import Receipt
from offbeat.plugins.simulation.audit_world import AuditTable, Findings

ADMITTED: Final = "admitted"
IN_FLIGHT: Final = "in flight"
READY: Final = "ready"
TRAINING: Final = "training"
TRAINED: Final = "trained"
DROPPED: Final = "dropped"
UNKNOWN: Final = "never drawn"
ENDLESS: Final = 2**63
OUTSTANDING: Final = (ADMITTED, IN_FLIGHT, READY, TRAINING)
PLACES: Final = (*OUTSTANDING, TRAINED, DROPPED, UNKNOWN)

LEAVES_FROM: Final = {
    events.ReturnKind.INFRASTRUCTURE: (IN_FLIGHT, READY),  # READY: its payload died with a machine
    events.ReturnKind.DATA: (IN_FLIGHT,),
    events.ReturnKind.OUTAGE: (IN_FLIGHT,),  # not a failure of the group
    events.ReturnKind.CANCELLED: (IN_FLIGHT,),
    events.ReturnKind.EVICTED: (READY,),
    events.ReturnKind.RECOVERED: (IN_FLIGHT, READY),
}
"""Places from which a group returns to be rolled out again, by kind of return."""

DROP_REASONS: Final = frozenset(
    {
        "actor_lost",
        "deadline",
        "empty_group",
        "engine_answer",
        "engine_lost",
        "engine_unavailable",
        "environment_raised",
        "environment_wrong_type",
        "generation_aborted",
        "no_valid_tokens",
        "overlong",
        "payload_lost",
        "picture_token",
        "picture_unusable",
        "refused_at_commit",
        "reward_answered_twice",
        "reward_deadline",
        "reward_import_failed",
        "reward_nan",
        "reward_none",
        "reward_not_finite",
        "reward_process_died",
        "reward_raised",
        "reward_wrong_type",
        "stale",
        "step_not_applied",
        "too_few_valid_samples",
        "truncated",
        "zero_variance",
    }
)
"""Reasons for which a prompt may be dropped."""


@dataclass(slots=True)
class AuditedGroup:
    """One prompt group."""

    place: str = UNKNOWN
    attempt: int = 0  # attempt of the last dispatch
    engine: str = ""
    version: int = -1  # version of its engine at the dispatch
    controller: int = 0  # controller incarnation that dispatched it
    receipt: Receipt | None = None
    oldest: int = -1  # version of its oldest token
    newest: int = -1
    brought_back: bool = False  # by a rewind, and not dispatched since
    returned: events.ReturnKind | None = None  # kind of its last return
    failures: int = 0  # returns of kind infrastructure
    step: int | None = None  # step that it is bound to


class AuditedGroups(AuditTable):
    """All groups that were ever admitted, with counts per place."""

    def __init__(self, config: RunConfig, prompts: int | None, findings: Findings) -> None:
        super().__init__(findings)
        self._config, self.prompts = config, prompts
        self.rows: dict[int, AuditedGroup] = {}
        self.drawn = 0
        self.counts: dict[str, int] = dict.fromkeys(PLACES, 0)
        self.version = 0  # trainer version according to the ledger
        self.shrunk: dict[int, int] = {}  # missing groups by step
        self._bound_to: dict[
            int | None, int
        ] = {}  # outstanding groups by the step they are bound to
        self.given_up = (
            0  # prompts dropped individually, not with the whole batch of a refused step
        )
        self.failed = 0  # prompts dropped for a failure of their data
        self.failed_infrastructure = 0  # prompts dropped for failures of the infrastructure
        # Number of controller incarnations; number of the last one
        self._controllers = self._incarnation = 0
        custom = isinstance(config.sampler, CustomSamplerConfig)
        # A custom policy may admit more, and may evict for other reasons.
        self._reach = ENDLESS if custom else max_outstanding_groups(config)
        self._capacity = config.buffer.capacity_groups or self._reach
        self._max_in_flight = config.rollout.max_in_flight or self._reach
        self._bound = config.sampler.max_staleness
        self._evicts_stale_only = not custom
        self._stamps_batches = isinstance(config.sampler, InOrderConfig)

    @property
    def outstanding(self) -> int:
        """Return the number of groups that are neither trained nor dropped."""
        return sum([self.counts[place] for place in OUTSTANDING])

    def rewound(self, version: int) -> None:
        """Handle a rewind. Afterwards more groups may be outstanding than the policy admits."""
        self.version = version
        for row in self.rows.values():
            row.brought_back = row.place not in (TRAINED, DROPPED)

    @property
    def source_is_empty(self) -> bool:
        """Return whether every available prompt has been admitted."""
        return self.prompts is not None and self.drawn >= self.prompts

    def move(self, prompt_index: int, place: str) -> AuditedGroup:
        row = self.rows[prompt_index]
        self.counts[row.place] -= 1
        self.counts[place] += 1
        self._count(row, -1)
        row.place = place
        self._count(row, 1)
        return row

    def _count(self, row: AuditedGroup, change: int) -> None:
        if row.place in OUTSTANDING:
            self._bound_to[row.step] = self._bound_to.get(row.step, 0) + change

    def step_refused(self, step: int) -> None:
        """Handle a refused step: its batch is gone, and later batches move one step forward."""
        self.shrunk = {
            at - (at > step): missing for at, missing in self.shrunk.items() if at != step
        }
        for row in self.rows.values():
            self._count(row, -1)
            if row.place not in (TRAINED, DROPPED) and row.step is not None and row.step > step:
                row.step -= 1
            self._count(row, 1)

    def trained_again(self, prompt_index: int, step: int) -> None:
        """Bind a group that a rewind undoes to the step that had trained it."""
        row = self.rows[prompt_index]
        row.step = None if row.step is None else step
        self.move(prompt_index, ADMITTED).receipt = None

    def is_ready(self, prompt_index: int) -> bool:
        """Return whether the group waits to be trained."""
        row = self.rows.get(prompt_index)
        return row is not None and row.place == READY

    def expect(self, what: str, prompt_index: int, *places: str) -> AuditedGroup:
        """Return the group's row; report a violation unless it is in one of these places."""
        row = self.rows.get(prompt_index)
        if row is None:
            row = self.rows[prompt_index] = AuditedGroup()
            self.counts[UNKNOWN] += 1
        if row.place not in places:
            invariant = "I2" if row.place == TRAINED else "I1"
            self._add(
                invariant,
                f"group {prompt_index} is {row.place} (attempt {row.attempt}); {what} needs it "
                f"{' or '.join(places)}",
            )
        return row

    # --- moves -----------------------------------------------------------------------------------

    def on_opened(self, event: events.Opened) -> None:
        if event.incarnation <= self._incarnation:
            self._add(
                "I13",
                f"incarnation {event.incarnation} opens after incarnation {self._incarnation}",
            )
        self._controllers += 1
        self._incarnation = event.incarnation

    def on_admitted(self, event: events.Admitted) -> None:
        if event.prompt_index != self.drawn:
            self._add(
                "I1", f"prompt index {event.prompt_index} was drawn; the next one is {self.drawn}"
            )
        if event.prompt_index in self.rows:
            return
        self.drawn += 1
        self.rows[event.prompt_index] = row = AuditedGroup(ADMITTED, step=event.target_step)
        self.counts[ADMITTED] += 1
        self._count(row, 1)
        self._check_room_of_step(event.target_step)
        if self.outstanding <= self._reach:
            return
        waiting = sum(row.brought_back and row.place == ADMITTED for row in self.rows.values())
        if self.outstanding - waiting > self._reach:
            self._add(
                "I8",
                f"{self.outstanding} groups are outstanding, {waiting} of them wait since a rewind; "
                f"the sampler's reach is {self._reach}",
            )

    def _check_room_of_step(self, step: int | None) -> None:
        """Check that the batch has room for the group admitted last."""
        if step is None or not self._stamps_batches:
            return
        room = self._config.groups_per_step - self.shrunk.get(step, 0)
        if self._bound_to[step] > room:
            self._add(
                "I3",
                f"{self._bound_to[step]} groups are bound to step {step}; its batch has {room}",
            )

    def on_dispatched(self, event: events.Dispatched) -> None:
        row = self.expect("a dispatch", event.prompt_index, ADMITTED)
        if event.attempt != row.attempt + 1:
            self._add(
                "I1",
                f"group {event.prompt_index} is dispatched as attempt {event.attempt}; the last one was "
                f"{row.attempt}",
            )
        self.move(event.prompt_index, IN_FLIGHT)
        row.attempt, row.engine, row.version = event.attempt, event.engine, event.version
        row.controller, row.receipt, row.brought_back = self._controllers, None, False
        counts = self.counts
        if counts[IN_FLIGHT] > self._max_in_flight:
            self._add(
                "I8",
                f"{counts[IN_FLIGHT]} groups are in flight; at most {self._max_in_flight} may be",
            )
        buffered = counts[IN_FLIGHT] + counts[READY] + counts[TRAINING]
        if buffered > self._capacity:
            self._add("I8", f"{buffered} groups fill the buffer; its capacity is {self._capacity}")

    def on_returned(self, event: events.Returned) -> None:
        places = LEAVES_FROM[event.kind]
        row = self.expect(f"to be {event.kind}", event.prompt_index, *places)
        if event.attempt != row.attempt:
            self._add(
                "I1",
                f"attempt {event.attempt} of group {event.prompt_index} returned; {row.attempt} was out",
            )
        if event.kind is events.ReturnKind.EVICTED:
            self._check_too_old("evicted", event.prompt_index, row)
        row.returned = event.kind
        row.failures += event.kind is events.ReturnKind.INFRASTRUCTURE
        self.move(event.prompt_index, ADMITTED).receipt = None

    def on_committed(self, event: events.Committed) -> None:
        receipt = event.receipt
        row = self.expect("a commit", receipt.prompt_index, IN_FLIGHT)
        if receipt.attempt != row.attempt or row.controller != self._controllers:
            self._add(
                "I1",
                f"attempt {receipt.attempt} of group {receipt.prompt_index} was committed; attempt "
                f"{row.attempt} of controller incarnation {row.controller} was out, and this is incarnation {self._controllers}",
            )
        if receipt.samples != self._config.samples_per_group or not all(
            map(math.isfinite, receipt.rewards)
        ):
            self._add(
                "I11", f"group {receipt.prompt_index} was committed with rewards {receipt.rewards}"
            )
        versions = [version for sample in receipt.version_spans for version, _ in sample] or [-1]
        self.move(receipt.prompt_index, READY)
        row.receipt, row.oldest, row.newest = receipt, min(versions), max(versions)

    def on_dropped(self, event: events.Dropped) -> None:
        row = self.expect("a drop", event.prompt_index, ADMITTED, IN_FLIGHT, READY)
        if event.label not in DROP_REASONS:
            self._add(
                "I3", f"group {event.prompt_index} was dropped for {event.label!r}: no known reason"
            )
        if event.label == ENVIRONMENT_UNAVAILABLE:
            self._add("I3", f"an outage of the environments cost prompt {event.prompt_index}")
        if event.reason is events.DropReason.STALE:
            self._check_too_old("dropped as stale", event.prompt_index, row)
        elif event.reason is events.DropReason.INFRASTRUCTURE:
            self.failed_infrastructure += 1
            allowed = self._config.rollout.infrastructure_retries
            if row.failures <= allowed:
                self._add(
                    "I3",
                    f"group {event.prompt_index} was dropped after {row.failures} infrastructure "
                    f"failures; rollout.infrastructure_retries is {allowed}",
                )
        elif event.reason is events.DropReason.DATA:
            self.failed += 1
            if row.returned is events.ReturnKind.INFRASTRUCTURE:
                text = "was dropped for its data; its infrastructure failed"
                self._add("I3", f"group {event.prompt_index} {text}")
        if event.shrinks:
            if event.reason in (events.DropReason.FILTERED, events.DropReason.STALE):
                self._add(
                    "I3",
                    f"group {event.prompt_index} was filtered and its step {event.shrinks} shrunk",
                )
            self.shrunk[event.shrinks] = self.shrunk.get(event.shrinks, 0) + 1
        self.given_up += 1
        self.move(event.prompt_index, DROPPED).receipt = None

    def check_age(self, prompt_index: int, row: AuditedGroup) -> None:
        """Check the age of a group that may be trained now."""
        if row.receipt is None:
            return
        if self.version - row.oldest > self._bound or row.newest > self.version:
            self._add(
                "I4",
                f"group {prompt_index} has tokens of versions {row.oldest} to {row.newest}; the trainer "
                f"is at {self.version}, max_staleness is {self._bound}",
            )

    def _check_too_old(self, what: str, prompt_index: int, row: AuditedGroup) -> None:
        if self._evicts_stale_only and row.receipt and self.version - row.oldest <= self._bound:
            self._add(
                "I3",
                f"group {prompt_index} of version {row.oldest} was {what} at version {self.version}: "
                f"within max_staleness {self._bound}",
            )
