"""The auditor's account of samples: I18, recounted from receipts and from the trainer's records.

Elsewhere a group counts as a whole. Here each of its samples is trained, masked, or dropped with
its group. A masked sample changes nothing: the advantages of a group come from its valid samples.
The worker's draws of masked samples, retried samples and branches must appear everywhere they are
counted: in receipts, in rows of the trainer, and in the metrics of a step.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple, Self

from offbeat.config.limits import on_failed_sample
from offbeat.config.run import RunConfig
from offbeat.controller.events import Committed, StepApplied
from offbeat.messages.groups import Receipt
from offbeat.plugins.simulation.audit_groups import AuditedGroups
from offbeat.plugins.simulation.audit_world import AuditTable, Findings, World
from offbeat.plugins.simulation.groups import media_bytes_of
from offbeat.plugins.simulation.records import DrawnSamples, StepReported, TrainerApplied

_MASKED: Final = "masked"
_ROUNDING: Final = 1e-6  # for a sum of advantages or a mean, both of order one


class AuditedSamples(AuditTable):
    """Compares the samples of receipts, steps and the trainer."""

    def __init__(
        self, config: RunConfig, groups: AuditedGroups, world: World, findings: Findings
    ) -> None:
        super().__init__(findings)
        self._config, self._groups, self._world = config, groups, world
        # Counts that may be reported of a version, which rewinds may have made several times. They
        # come from the trainer, because a report may outlive the controller's record of its step.
        self._recounts = defaultdict[int, list[SampleCounts]](list)

    def on_committed(self, event: Committed) -> None:
        """Check a receipt's account of its samples."""
        receipt = event.receipt
        masked = masked_samples(receipt)
        rollout, size = self._config.rollout, self._config.samples_per_group
        least = rollout.min_valid_samples or min(2, size)
        about = f"group {receipt.prompt_index} was committed with samples {masked} masked"
        if size - len(masked) < least:
            self._add("I18", f"{about}; {least} of {size} have to be valid")
        if masked and on_failed_sample(self._config) == "fail_group":
            self._add("I18", f"{about}; a failed sample fails its group here")
        if any(receipt.valid_tokens[sample] for sample in masked):
            self._add("I18", f"{about}; tokens to train: {receipt.valid_tokens}")
        key = receipt.prompt_index, receipt.attempt, receipt.engine, receipt.engine_incarnation
        drawn = [each.samples for each in self._world.answers.get(key, ())]
        ones = (1,) * size
        says = DrawnSamples(
            tuple(status == _MASKED for status in receipt.statuses) or (False,) * size,
            receipt.retries or (0,) * size,
            receipt.turns or ones,
            receipt.branches or ones,
            media_bytes_of(receipt),
        )
        if drawn and says not in drawn:
            self._add("I18", f"{about}: {says}; its worker drew {drawn[-1]}")

    def on_applied(self, event: StepApplied) -> None:
        """Count the samples of a step and compare them with the journal's counts."""
        rows = self._groups.rows
        receipts = [
            receipt
            for prompt_index in event.prompt_indices
            if prompt_index in rows and (receipt := rows[prompt_index].receipt) is not None
        ]
        masked = sum(len(masked_samples(receipt)) for receipt in receipts)
        valid = sum(len(receipt.rewards) for receipt in receipts) - masked
        has_all = len(receipts) == len(event.prompt_indices)  # else another invariant is broken
        if has_all and (event.samples, event.masked_samples) != (valid, masked):
            self._add(
                "I18",
                f"step {event.step} counts {event.samples} samples and {event.masked_samples} masked "
                f"ones; its receipts have {valid} and {masked}",
            )

    def check_trained(self, record: TrainerApplied, receipts: dict[int, Receipt | None]) -> None:
        """Compare the samples that the trainer received with the receipts of their groups."""
        known = [each for at in record.prompt_indices if (each := receipts.get(at)) is not None]
        if len(known) == len(record.prompt_indices):
            self._recounts[record.version].append(SampleCounts.of(known))
        groups = zip(
            record.prompt_indices,
            record.masked,
            record.branches,
            record.advantages,
            record.media_bytes or (0,) * len(record.prompt_indices),
            strict=True,
        )
        for prompt_index, masked, branches, advantages, media_bytes in groups:
            receipt = receipts.get(prompt_index)
            if receipt is None:
                continue
            about = f"group {prompt_index}, of which samples {masked} are masked"
            if masked != masked_samples(receipt):
                self._add("I18", f"{about}: its receipt says {masked_samples(receipt)}")
            if branches != (receipt.branches or (1,) * len(receipt.rewards)):
                self._add(
                    "I18", f"{about}: {branches} rows trained; its receipt says {receipt.branches}"
                )
            if media_bytes != media_bytes_of(receipt):
                of_receipt = f"its receipt says {media_bytes_of(receipt)}"
                self._add("I18", f"{about}: {media_bytes} bytes of pictures trained; {of_receipt}")
            if any(advantages[sample] for sample in masked):
                self._add("I18", f"{about}, was trained with advantages {advantages}")
            valid = [each for place, each in enumerate(advantages) if place not in masked]
            if abs(math.fsum(valid)) > _ROUNDING * len(valid):
                self._add("I18", f"{about}: the advantages {valid} of the others do not cancel")

    def check_reported(self) -> None:
        """Compare the metrics of every step with a recount of its samples."""
        for report in self._world.reported:
            recounts = self._recounts[report.version] if report.step == report.version else []
            if recounts and not any(counts.are_reported_by(report) for counts in recounts):
                self._add(
                    "I18", f"{report} does not report the samples of its step: {recounts[-1]}"
                )


class SampleCounts(NamedTuple):
    """Counts of the samples of a step."""

    samples: int  # masked ones included
    masked: int
    retried: int
    branches: int
    branched: int

    @classmethod
    def of(cls, receipts: Sequence[Receipt]) -> Self:
        """Recount the samples of these groups, one by one."""
        counts = [0, 0, 0, 0, 0]
        for receipt in receipts:
            for sample in range(len(receipt.rewards)):
                branches = receipt.branches[sample] if receipt.branches else 1
                counts[0] += 1
                counts[1] += bool(receipt.statuses) and receipt.statuses[sample] == _MASKED
                counts[2] += bool(receipt.retries) and receipt.retries[sample] > 0
                counts[3] += branches
                counts[4] += branches > 1
        return cls(*counts)

    def are_reported_by(self, report: StepReported) -> bool:
        """Return whether the shares that a step reported match these counts."""
        pairs = (
            (report.masked_fraction, self.masked),
            (report.retried_fraction, self.retried),
            (report.branches_mean, self.branches),
            (report.branched_fraction, self.branched),
        )
        return all(abs(share - count / self.samples) < _ROUNDING for share, count in pairs)


def masked_samples(receipt: Receipt) -> tuple[int, ...]:
    """Return the samples that a receipt marks as masked."""
    return tuple(place for place, status in enumerate(receipt.statuses) if status == _MASKED)
