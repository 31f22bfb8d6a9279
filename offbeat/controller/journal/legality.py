"""Checks that each event of a journal can follow the events before it. Pure.

The checksum of a frame only proves that its bytes are intact, not that the frame is in its original
place. A file with frames of other files, or with a repeated part, has valid frames too.
"""

from collections import Counter
from collections.abc import Collection, Iterable

from offbeat.controller.events import (
    Admitted,
    AnyEvent,
    Claimed,
    Committed,
    Dispatched,
    Dropped,
    Opened,
    Returned,
    Rewound,
    StepApplied,
    StepIntent,
    UndoneStep,
)
from offbeat.controller.group_moves import LEAVES, RETURNS_FROM, GroupEnd, Place
from offbeat.controller.group_table import GroupTable
from offbeat.messages.groups import group_id


def contradiction(table: GroupTable, event: AnyEvent) -> str | None:  # noqa: C901, PLR0911, PLR0912 - the table of all events
    """Return why the event cannot follow this state of the table, or None if it can."""
    match event:
        case Admitted():
            if event.prompt_index != table.totals.drawn:
                return f"{group_id(event.prompt_index)} is drawn, {table.totals.drawn} were drawn before"
        case Dispatched():
            return _group(table, event.prompt_index, event.attempt - 1, LEAVES[Dispatched])
        case Committed():
            receipt = event.receipt
            return _group(table, receipt.prompt_index, receipt.attempt, LEAVES[Committed])
        case Returned():
            return _group(table, event.prompt_index, event.attempt, RETURNS_FROM[event.kind])
        case Dropped():
            return _group(table, event.prompt_index, None, LEAVES[Dropped])
        case Claimed():
            problems = (_group(table, each, None, LEAVES[Claimed]) for each in event.prompt_indices)
            return next((problem for problem in problems if problem), None)
        case StepIntent() | StepApplied() if table.rewinding_to is not None:
            return f"step {event.step} is taken during a rewind to version {table.rewinding_to}"
        case StepIntent():
            return _step(table, event.step, event.prompt_indices)
        case StepApplied():
            if event.version != table.trainer_version + 1:
                return f"version {event.version} is made of version {table.trainer_version}"
            return _step(table, event.step, event.prompt_indices) or _check_trained(table, event)
        case Rewound():
            return _rewind(table, event)
        case Opened():
            if table.run_id not in ("", event.run_id):
                return f"it is of run {event.run_id}, those before of run {table.run_id}"
        case _:
            pass
    return None


def _group(
    table: GroupTable, prompt_index: int, attempt: int | None, places: Collection[Place | GroupEnd]
) -> str | None:
    """Return why a group is not in one of these places with this attempt, or None if it is."""
    group = table.groups.get(prompt_index)
    if group is None:
        return f"{group_id(prompt_index)} was never drawn, or has ended"
    if group.place not in places or attempt not in (None, group.attempt):
        return f"{group_id(prompt_index)} is {group.place}, attempt {group.attempt}"
    return None


def _check_trained(table: GroupTable, event: StepApplied) -> str | None:
    """Return why the attempts trained by a step are wrong, or None if they are right."""
    trained = dict(zip(event.prompt_indices, event.attempts, strict=False))
    if trained != {prompt_index: group.attempt for prompt_index, group in table.training.items()}:
        return f"step {event.step} is of other attempts than those that are training"
    return None


def _rewind(table: GroupTable, event: Rewound) -> str | None:
    """Return why the steps that a rewind claims to undo are wrong, or None if they are right."""
    now, to_version = table.trainer_version, event.to_version
    if to_version > now:
        return f"version {now} is rewound to {to_version}"
    if event.target > to_version:
        return f"a rewind to version {event.target} goes through version {to_version}"
    if [step.version for step in event.undone] != list(range(to_version + 1, now + 1)):
        return f"it undoes {len(event.undone)} steps from version {now} back to {to_version}"
    undone = (prompt_index for step in event.undone for prompt_index in step.prompt_indices)
    known = next((prompt_index for prompt_index in undone if prompt_index in table.groups), None)
    if known is not None:
        return f"{group_id(known)} is undone, and was not trained"
    return next((problem for step in event.undone if (problem := _attempts(step))), None) or (
        _samples(table, event.undone)
    )


def _attempts(step: UndoneStep) -> str | None:
    """Return why the attempts of an undone step are wrong, or None if they are right."""
    if len(step.attempts) != len(step.prompt_indices):
        return f"version {step.version} has {len(step.prompt_indices)} groups, {len(step.attempts)} attempts"
    return None


def _samples(table: GroupTable, undone: Iterable[UndoneStep]) -> str | None:
    """Return why the samples of undone steps are wrong, or None if they are right."""
    samples = Counter[int]()
    for step in undone:
        for behind, count in step.staleness:
            samples[behind] += count
    for behind, count in samples.items():
        trained = table.steps.samples.get(behind, 0)
        if count > trained:
            return f"it undoes {count} samples of staleness {behind}, {trained} were trained"
    return None


def _step(table: GroupTable, step: int, prompt_indices: Collection[int]) -> str | None:
    if set(prompt_indices) != table.training.keys():
        return f"step {step} is of {len(prompt_indices)} groups, others are training"
    return None
