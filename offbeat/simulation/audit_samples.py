"""The auditor's account of samples: I18, recounted from receipts and from the trainer's records.

A group counts as a whole elsewhere. Here each of its samples is trained, masked or dropped with its
group, and a masked one moves nothing: the advantages of a group are those of its valid samples.
"""

import math
from typing import Final

from offbeat.config.limits import on_failed_sample
from offbeat.config.run import RunConfig
from offbeat.controller.events import StepApplied
from offbeat.messages.groups import Receipt
from offbeat.simulation.audit_findings import Findings
from offbeat.simulation.audit_groups import (
    ADMITTED,
    DROPPED,
    IN_FLIGHT,
    READY,
    TRAINING,
    AuditedGroups,
)
from offbeat.simulation.records import TrainerApplied

_MASKED: Final = "masked"
_ROUNDING: Final = 1e-6  # of a sum of advantages, which are of order one


class AuditedSamples:
    """Samples of every step that stands, and what became of all others."""

    def __init__(self, config: RunConfig, groups: AuditedGroups, findings: Findings) -> None:
        self._config, self._groups, self._findings = config, groups, findings
        self._steps: list[tuple[int, int]] = []  # valid and masked samples of versions 1, 2, ...

    def committed(self, receipt: Receipt) -> None:
        """Check what a receipt says of its samples."""
        masked = masked_samples(receipt)
        rollout, size = self._config.rollout, self._config.samples_per_group
        least = rollout.min_valid_samples or min(2, size)
        about = f"group {receipt.prompt_index} was committed with samples {masked} masked"
        if size - len(masked) < least:
            self._findings.add("I18", f"{about}; {least} of {size} have to be valid")
        if masked and on_failed_sample(self._config) == "fail_group":
            self._findings.add("I18", f"{about}; a failed sample fails its group here")
        if any(receipt.valid_tokens[sample] for sample in masked):
            self._findings.add("I18", f"{about}; tokens to train: {receipt.valid_tokens}")

    def applied(self, event: StepApplied) -> None:
        """Count the samples of a step, and compare with what the journal says of it."""
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
            self._findings.add(
                "I18",
                f"step {event.step} counts {event.samples} samples and {event.masked_samples} masked "
                f"ones; its receipts have {valid} and {masked}",
            )
        self._steps.append((event.samples, event.masked_samples))

    def rewound(self, to_version: int) -> None:
        del self._steps[to_version:]

    def check_trained(self, record: TrainerApplied, receipts: dict[int, Receipt | None]) -> None:
        """Compare what the trainer got of each sample with the receipt of its group."""
        groups = zip(record.prompt_indices, record.masked, record.advantages, strict=True)
        for prompt_index, masked, advantages in groups:
            receipt = receipts.get(prompt_index)
            if receipt is None:
                continue
            about = f"group {prompt_index}, of which samples {masked} are masked"
            if masked != masked_samples(receipt):
                self._findings.add("I18", f"{about}: its receipt says {masked_samples(receipt)}")
            if any(advantages[sample] for sample in masked):
                self._findings.add("I18", f"{about}, was trained with advantages {advantages}")
            valid = [each for place, each in enumerate(advantages) if place not in masked]
            if abs(math.fsum(valid)) > _ROUNDING * len(valid):
                self._findings.add(
                    "I18", f"{about}: the advantages {valid} of the others do not cancel"
                )

    def check_end(self) -> None:
        """Check that every sample drawn was trained, masked or dropped, or is outstanding.

        A group in two places, or in none, has been found by then: it breaks this sum as well.
        """
        if self._findings.violations:
            return
        size, counts, groups = self._config.samples_per_group, self._groups.counts, self._groups
        trained = sum(valid for valid, _ in self._steps)
        masked = sum(count for _, count in self._steps)
        dropped = size * counts[DROPPED]
        left = size * sum(counts[place] for place in (ADMITTED, IN_FLIGHT, READY, TRAINING))
        if trained + masked + dropped + left != size * groups.drawn:
            self._findings.add(
                "I18",
                f"{size * groups.drawn} samples were drawn; {trained} are trained, {masked} masked, "
                f"{dropped} dropped and {left} outstanding",
            )


def masked_samples(receipt: Receipt) -> tuple[int, ...]:
    """Return the samples that a receipt calls masked."""
    return tuple(place for place, status in enumerate(receipt.statuses) if status == _MASKED)
