"""The reference: what a synchronous run in prompt order trains, by a plain loop.

No controller, no event loop, no engine: prompts are drawn in order, rolled out by the pure content
function of the fakes, and trained a step at a time. Whatever was killed, late or lost meanwhile, a
real run with ``in_order`` and no look-ahead has to have done exactly this.
"""

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from types import MappingProxyType
from typing import Final

from offbeat.config.run import RunConfig
from offbeat.controller.events import Committed, Returned, Rewound, StepApplied
from offbeat.controller.rollouts import group_seed
from offbeat.messages.groups import Prompt, Receipt, RolloutTask, VersionSpans
from offbeat.plugins.simulation.disk import INITIAL_DIGEST
from offbeat.plugins.simulation.episode import EpisodeResult
from offbeat.plugins.simulation.groups import Content
from offbeat.plugins.simulation.records import TrainerApplied, TrainerRestored

_NONE: Final[Mapping[int, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Step:
    """What one applied step trained; groups in the order of their prompt indices."""

    version: int  # it made
    prompt_indices: tuple[int, ...]
    rewards: tuple[tuple[float, ...], ...]
    spans: tuple[tuple[VersionSpans, ...], ...]  # which weights the tokens come from
    digest: str  # of the weights after it


# --- by the reference ------------------------------------------------------------------------------


def reference(
    config: RunConfig,
    *,
    prompts: int | None = None,
    failures: Mapping[int, int] = _NONE,
    refusals: Mapping[int, int] = _NONE,
) -> list[Step]:
    """All steps of a run whose engines serve every version before anything is sampled for the next.

    Args:
        config: The run.
        prompts: Rows of the source; None: endless.
        failures: Attempts that fail for their data, by prompt index; 0 where it is not named.
        refusals: Times the optimizer does not apply a step, by step.
    """
    source = _Source(config, prompts, failures)
    steps, digest = list[Step](), INITIAL_DIGEST
    for step in range(1, config.steps + 1):
        for _ in range(refusals.get(step, 0)):
            _Batch(config).fill(source)  # its groups are dropped; the step trains the next batch
        batch = _Batch(config)
        batch.fill(source)
        groups = batch.groups
        if not groups:
            break
        digest = _trained(digest, groups)
        steps.append(
            Step(
                step,
                tuple(group.task.prompt_index for group in groups),
                tuple(group.rewards for group in groups),
                tuple(_sampled_at(step - 1, group) for group in groups),
                digest,
            )
        )
    return steps


class _Source:
    """Rolls one prompt out after the other. ``None`` is one that was given up or filtered."""

    def __init__(self, config: RunConfig, count: int | None, failures: Mapping[int, int]) -> None:
        self._config, self._failures = config, failures
        self._prompt_indices: Iterator[int] = (
            itertools.count() if count is None else iter(range(count))
        )

    def next(self) -> tuple[Content | None, bool]:
        """The group, or None; whether it was its data that failed.

        Raises:
            StopIteration: There is no further prompt.
        """
        config, prompt_index = self._config, next(self._prompt_indices)
        if self._failures.get(prompt_index, 0) > config.rollout.data_retries:
            return None, True
        seed = group_seed(config.seed, prompt_index)
        task = RolloutTask(
            prompt=Prompt(prompt_index, 0, prompt_index, {}),
            attempt=1,
            samples=config.samples_per_group,
            engine="",
            seed=seed,
            deadline_s=1.0,
        )
        group = Content(task, config)
        return (None if self._is_filtered(group) else group), False

    def _is_filtered(self, group: Content) -> bool:
        filters = self._config.filters
        cut = sum(length == group.longest for length in group.lengths) / len(group.lengths)
        if filters.max_truncated_fraction is not None and cut > filters.max_truncated_fraction:
            return True
        return filters.zero_variance and len(set(group.rewards)) == 1


@dataclass(slots=True)
class _Batch:
    """The groups of one step."""

    config: RunConfig
    groups: list[Content] = field(default_factory=list[Content])
    missing: int = 0  # groups it goes without

    def fill(self, source: _Source) -> None:
        """Draw until it is whole, or as small as a recipe lets it be, or the prompts are over."""
        whole = self.config.groups_per_step
        while len(self.groups) + self.missing < whole:
            try:
                group, failed = source.next()
            except StopIteration:
                return
            if group is not None:
                self.groups.append(group)
            elif failed and self._may_shrink():
                self.missing += 1

    def _may_shrink(self) -> bool:
        limits, whole = self.config.rollout, self.config.groups_per_step
        smallest = max(1, math.ceil(limits.min_step_batch_fraction * whole))
        return limits.on_dropped_prompt == "shrink" and whole - self.missing > smallest


def _trained(digest: str, groups: list[Content]) -> str:
    """The weights after a step, by the rule of the fake trainer."""
    content = [(group.task.prompt_index, group.task.seed) for group in groups]
    return hashlib.blake2b(f"{digest}{content}".encode(), digest_size=8).hexdigest()


def _sampled_at(version: int, group: Content) -> tuple[VersionSpans, ...]:
    return tuple(((version, length),) for length in group.lengths)


# --- by a run --------------------------------------------------------------------------------------


def steps_of(result: EpisodeResult) -> list[Step]:
    """What a run trained in the end, by its journal; the weights by its trainer's own account."""
    receipts, applied = dict[int, Receipt](), dict[int, list[Receipt]]()
    for event in result.journal:
        match event:
            case Committed():
                receipts[event.receipt.prompt_index] = event.receipt
            case StepApplied():
                applied[event.version] = [
                    receipts[prompt_index] for prompt_index in sorted(event.prompt_indices)
                ]
            case Rewound():
                applied = {made: held for made, held in applied.items() if made <= event.to_version}
            case _:
                pass
    digests = dict[int, str]()
    for record in result.records:
        if isinstance(record, TrainerRestored):
            digests = {made: said for made, said in digests.items() if made <= record.version}
        elif isinstance(record, TrainerApplied):
            digests[record.version] = record.digest
    return [
        Step(
            version,
            tuple(receipt.prompt_index for receipt in groups),
            tuple(receipt.rewards for receipt in groups),
            tuple(tuple(map(_merged, receipt.version_spans)) for receipt in groups),
            digests[version],
        )
        for version, groups in applied.items()
    ]


def _merged(spans: VersionSpans) -> VersionSpans:
    """An engine that took the same weights once more has split a sample, and changed nothing."""
    versions = itertools.groupby(spans, key=itemgetter(0))
    return tuple((version, sum(tokens for _, tokens in same)) for version, same in versions)


def data_failures(result: EpisodeResult) -> dict[int, int]:
    """Attempts that failed for their data, by prompt index."""
    failed = dict[int, int]()
    for event in result.journal:
        if isinstance(event, Returned) and event.kind == "data":
            failed[event.prompt_index] = failed.get(event.prompt_index, 0) + 1
    return failed
