"""The auditor's account of optimizer steps: compares the journal with the trainer's records.

I2, I5, I7, and the sums of I3. In the journal a step is claimed, intended, applied or refused. The
trainer records the groups of each step. Both must contain the same steps.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from offbeat.config.run import RunConfig
from offbeat.controller import events
from offbeat.messages.groups import Receipt
from offbeat.plugins.simulation.audit_groups import (
    ADMITTED,
    DROPPED,
    IN_FLIGHT,
    READY,
    TRAINED,
    TRAINING,
    AuditedGroups,
)
from offbeat.plugins.simulation.audit_samples import AuditedSamples
from offbeat.plugins.simulation.audit_world import (
    AuditedStep,
    AuditTable,
    Findings,
    Trained,
    World,
    list_versions,
)
from offbeat.plugins.simulation.records import TrainerApplied


class Intent(NamedTuple):
    """State of the ledger when a step was about to be finished."""

    prompt_indices: tuple[int, ...]
    receipts: dict[int, Receipt | None]
    before: Trained


class Steps(AuditTable):
    """Optimizer steps according to the journal."""

    def __init__(
        self,
        config: RunConfig,
        groups: AuditedGroups,
        samples: AuditedSamples,
        world: World,
        findings: Findings,
    ) -> None:
        super().__init__(findings)
        self._config, self._groups, self._world = config, groups, world
        self.samples = samples
        self.open: tuple[int, int] | None = None  # step and attempt of the groups in training
        self.intent: tuple[int, int] | None = None  # step whose outcome is unknown
        self.stack: list[tuple[int, int]] = []  # step and attempt that led to versions 1, 2, ...
        self.last_checkpoint = 0  # version of the newest checkpoint that the journal relies on
        self.short: tuple[int, str] | None = None  # the newest incomplete step, and the reason
        self.rewinds = 0
        self._lineage = 0
        self._rewinding_to: int | None = None  # target of a rewind that is partly recorded
        self._training: list[int] = []  # in claim order
        self._intents: dict[tuple[int, int], Intent] = {}
        self._trained: list[tuple[int, ...]] = []  # prompt indices of versions 1, 2, ...
        self._last_attempt = 0

    # --- the journal -----------------------------------------------------------------------------

    def on_claimed(self, event: events.Claimed) -> None:
        groups, key = self._groups, (event.step, event.attempt)
        if self._rewinding_to is not None:
            self._add("I7", f"step {event.step} begins in a rewind to {self._rewinding_to}")
        if event.step != groups.version + 1:
            self._add(
                "I7", f"step {event.step} claims groups while the trainer is at {groups.version}"
            )
        if self.open is None and event.attempt <= self._last_attempt:
            self._add("I7", f"attempt {event.attempt} begins after attempt {self._last_attempt}")
        if self.open not in (None, key):
            self._add("I7", f"{key} claims groups while {self.open} is open")
        self.open, self._last_attempt = key, max(event.attempt, self._last_attempt)
        for prompt_index in event.prompt_indices:
            row = groups.expect("a claim", prompt_index, READY)
            groups.check_age(prompt_index, row)
            groups.move(prompt_index, TRAINING)
        self._training += event.prompt_indices
        room = self._config.groups_per_step - groups.shrunk.get(event.step, 0)
        if len(self._training) > room:
            self._add(
                "I3",
                f"step {event.step} claims {len(self._training)} groups; it has room for {room}",
            )

    def on_unclaimed(self, event: events.Unclaimed) -> None:
        if (
            self.open is not None and self.open[0] != event.step
        ):  # a later incarnation has its own attempts
            self._add("I7", f"step {event.step} is aborted; open is {self.open}")
        self._leave(READY)

    def on_intended(self, event: events.StepIntent) -> None:
        key = event.step, event.attempt
        self._is_open("is intended", *key)
        self._same_prompt_indices("intends", event.step, event.prompt_indices)
        if key in self._intents:
            self._add("I7", f"step {event.step} attempt {event.attempt} is intended twice")
        rows = self._groups.rows
        for prompt_index in self._training:
            self._groups.check_age(prompt_index, rows[prompt_index])
        receipts = {prompt_index: rows[prompt_index].receipt for prompt_index in self._training}
        self._intents[key] = Intent(event.prompt_indices, receipts, tuple(self.stack))
        self.intent = key

    def on_applied(self, event: events.StepApplied) -> None:
        groups, key = self._groups, (event.step, event.attempt)
        if self.intent != key:
            self._add("I7", f"step {key} was applied; the last intent is {self.intent}")
        self._same_prompt_indices("applies", event.step, event.prompt_indices)
        if event.version != groups.version + 1 or event.step != event.version:
            self._add(
                "I5", f"step {event.step} made version {event.version} out of {groups.version}"
            )
        if event.frontier != groups.drawn:
            self._add("I1", f"the frontier is {event.frontier}; {groups.drawn} prompts were drawn")
        self._check_applied_by_trainer(event)
        self._check_kept(event)
        self._check_size(event)
        self._leave(TRAINED)
        self.stack.append(key)
        self._trained.append(event.prompt_indices)
        groups.version = len(self.stack)

    def on_refused(self, event: events.StepRefused) -> None:
        self._is_open("is refused", event.step, event.attempt)
        if (event.step, event.attempt) in self._world.steps:
            self._add(
                "I7",
                f"step {event.step} attempt {event.attempt} was refused; the trainer applied it",
            )
        self._leave(DROPPED)
        self._groups.step_refused(event.step)

    def on_rewound(self, event: events.Rewound) -> None:
        groups = self._groups
        self._check_rewind(event)
        self.rewinds += event.lineage != self._lineage
        self._lineage, self._rewinding_to = event.lineage, event.rewinding_to
        self._leave(READY)
        for prompt_index, row in groups.rows.items():
            if row.place == READY and row.newest > event.to_version:
                groups.move(prompt_index, ADMITTED).receipt = None
        undone = [step.prompt_indices for step in event.undone]
        if undone != self._trained[event.to_version :]:
            self._add(
                "I1",
                f"a rewind to version {event.to_version} undoes groups {undone}; trained since were "
                f"{self._trained[event.to_version :]}",
            )
        for step, prompt_indices in enumerate(
            self._trained[event.to_version :], event.to_version + 1
        ):
            for prompt_index in prompt_indices:
                groups.trained_again(prompt_index, step)
        del self.stack[event.to_version :], self._trained[event.to_version :]
        self.last_checkpoint = min(self.last_checkpoint, event.to_version)
        groups.rewound(len(self.stack))
        if self.short is not None and self.short[0] > groups.version:
            self.short = None

    def _check_rewind(self, event: events.Rewound) -> None:
        groups = self._groups
        lineage = self._lineage + (self._rewinding_to is None)
        if event.to_version > groups.version or event.lineage != lineage:
            self._add(
                "I5",
                f"version {groups.version} of lineage {self._lineage} is rewound to "
                f"{event.to_version} of lineage {event.lineage}",
            )
        if event.target not in self._world.restored:
            self._add("I2", f"the trainer was never restored to version {event.target}")
        if event.target > event.to_version:
            self._add("I5", f"version {event.to_version} is below the {event.target} it is to be")
        if groups.counts[IN_FLIGHT]:
            self._add("I1", f"{groups.counts[IN_FLIGHT]} groups are in flight over a rewind")

    def on_checkpointed(self, event: events.Checkpointed) -> None:
        self.last_checkpoint = event.version
        if (event.version, event.digest) not in self._world.written:
            self._add(
                "I12",
                f"a checkpoint of version {event.version} with digest {event.digest} is counted on; "
                "none was written",
            )
        if event.version > self._groups.version:
            self._add(
                "I12",
                f"a checkpoint of version {event.version} is counted on at version "
                f"{self._groups.version}",
            )

    def _leave(self, place: str) -> None:
        """End the open step and move its groups to ``place``."""
        for prompt_index in self._training:
            self._groups.move(prompt_index, place)
        self._training, self.open, self.intent = [], None, None

    def _is_open(self, what: str, step: int, attempt: int) -> None:
        if self.open is not None and self.open != (step, attempt):
            self._add("I7", f"step {(step, attempt)} {what}; open is {self.open}")

    def _same_prompt_indices(self, what: str, step: int, prompt_indices: tuple[int, ...]) -> None:
        if list(prompt_indices) != self._training:
            self._add(
                "I1", f"step {step} {what} groups {prompt_indices}; it has claimed {self._training}"
            )

    def _check_size(self, event: events.StepApplied) -> None:
        """Check that every step is complete, except the one that ends the data."""
        if self.short is not None:
            # A batch bound to its step stays incomplete if no prompt is left to complete it.
            if not self._groups.source_is_empty:
                self._add("I3", f"{self.short[1]}, and another step followed")
            self.short = None
        size, config = len(event.prompt_indices), self._config
        whole = config.groups_per_step - self._groups.shrunk.get(event.step, 0)
        if size < whole:
            self.short = (
                event.version,
                f"step {event.step} trained {size} groups instead of {whole}",
            )
        if whole < config.rollout.min_step_batch_fraction * config.groups_per_step:
            self._add(
                "I3", f"step {event.step} shrank to {whole} of {config.groups_per_step} groups"
            )

    def _check_kept(self, event: events.StepApplied) -> None:
        """Check that the checkpoint due before this step was written, even after crashes."""
        interval = self._config.checkpoint.interval
        if not interval or "checkpoint_fails" in self._world.faults:
            return
        due = (event.version - 1) // interval * interval
        if self.last_checkpoint < due:
            self._add(
                "I12",
                f"step {event.step} was trained and the checkpoint of version {due} was not made; the "
                f"newest is of version {self.last_checkpoint}",
            )

    def _check_applied_by_trainer(self, event: events.StepApplied) -> None:
        moment = self._world.steps.get((event.step, event.attempt))
        if moment is None or moment.record.version != event.version:
            self._add(
                "I2",
                f"step {event.step} attempt {event.attempt} counts as version {event.version}; the "
                "trainer never applied it",
            )
        elif sorted(moment.record.prompt_indices) != sorted(event.prompt_indices):
            self._add(
                "I2",
                f"step {event.step} counts groups {event.prompt_indices} as trained; the trainer says "
                f"{moment.record.prompt_indices}",
            )

    # --- the trainer's records -------------------------------------------------------------------

    def check_trainer(self) -> None:
        """Check each step that the trainer applied against its intent in the journal."""
        findings = self._findings
        findings.source = "records"
        for key, moment in self._world.steps.items():
            findings.index, findings.current = moment.record_index, moment.record
            intent = self._intents.get(key)
            if intent is None:
                self._add("I7", f"step {key} was applied without a durable intent")
                continue
            if sorted(intent.prompt_indices) != sorted(moment.record.prompt_indices):
                self._add(
                    "I7",
                    f"step {key} was intended with groups {intent.prompt_indices}; the trainer applied "
                    f"{moment.record.prompt_indices}",
                )
            if intent.before != moment.before:
                self._add("I2", f"step {key} began: {difference(moment.before, intent.before)}")
            self._check_minibatches(moment.record)
            self._check_samples(moment, intent)
            self.samples.check_trained(moment.record, intent.receipts)

    def check_end(self, *, finished: bool) -> None:
        """Check that the trainer's steps at the end are the steps of the ledger.

        A run that keeps no model does not call its trainer after the last step. The trainer may
        have restarted by then, without any step.
        """
        trained, counted = self._world.steps_in_weights, tuple(self.stack)
        if finished and self._rewinding_to is not None:
            self._add("I5", f"a rewind to {self._rewinding_to} was never finished")
        if trained == counted or (finished and not trained and not self._config.checkpoint.final):
            return
        if not finished:
            unknown = (*counted, self.intent) if self.intent else counted
            if trained in (unknown, counted[: len(trained)]):
                return  # the next controller would adopt the step or rewind
        self._add("I2", f"at the end {difference(trained, counted)}")

    def _check_minibatches(self, record: TrainerApplied) -> None:
        """Check that each group is in one minibatch of about equal size, trained in every epoch."""
        algorithm, groups = self._config.algorithm, len(record.prompt_indices)
        sizes = Counter(record.minibatches or (0,) * groups)
        parts = min(algorithm.minibatches, groups)
        is_even = len(sizes) == parts and max(sizes.values()) - min(sizes.values()) <= 1
        if sizes.total() != groups or not is_even or max(sizes) >= algorithm.minibatches:
            self._add(
                "I2",
                f"step {record.step} trained {groups} groups in minibatches of {dict(sizes)}; the "
                f"recipe divides them into {algorithm.minibatches}",
            )
        if record.epochs != algorithm.epochs:
            self._add(
                "I2",
                f"step {record.step} trained its groups {record.epochs} times; the recipe says "
                f"{algorithm.epochs}",
            )

    def _check_samples(self, moment: AuditedStep, intent: Intent) -> None:
        """Check that the trained payloads are the committed ones, with weights of this lineage."""
        record = moment.record
        for prompt_index, attempt, oldest in zip(
            record.prompt_indices, record.attempts, record.oldest, strict=True
        ):
            receipt = intent.receipts.get(prompt_index)
            if receipt is None:
                continue
            spans = receipt.version_spans
            if attempt != receipt.attempt or oldest != min(list_versions(spans)):
                self._add(
                    "I6",
                    f"group {prompt_index} was trained as attempt {attempt} of version {oldest}; its "
                    f"receipt is attempt {receipt.attempt} with {spans}",
                )
                continue
            self._check_digests(moment, receipt)

    def _check_digests(self, moment: AuditedStep, receipt: Receipt) -> None:
        """Check a receipt's digests against the possible draws.

        A forgotten draw may be drawn again.
        """
        key = receipt.prompt_index, receipt.attempt, receipt.engine, receipt.engine_incarnation
        wrong = [
            _other_weights(answer.digests, moment.digests)
            for answer in self._world.answers.get(key, ())
            if answer.spans == receipt.version_spans
        ]
        if wrong and all(wrong):
            self._add("I6", f"group {receipt.prompt_index} was sampled from {wrong[-1]}")


def _other_weights(sampled: Mapping[int, str], trained: Sequence[str | None]) -> str:
    """Return the first version whose weights differ from the trainer's, or an empty string."""
    for version, digest in sampled.items():
        known = trained[version] if version < len(trained) else None
        if known is not None and digest != known:
            return f"version {version} with digest {digest}; the trainer that trains it had {known}"
    return ""


def difference(trained: Trained, counted: Trained) -> str:
    """Return the first version at which trainer and ledger differ."""
    for version, (theirs, ours) in enumerate(zip(trained, counted, strict=False), start=1):
        if theirs != ours:
            return f"version {version} of the trainer is step {theirs}, of the ledger {ours}"
    if len(trained) > len(counted):
        return f"the trainer holds step {trained[len(counted)]}, which the ledger does not count"
    return f"the ledger counts step {counted[len(trained)]}, which the trainer does not hold"
