"""Whether an event of a journal can have followed those before it. Pure.

The checksum of a frame says that its bytes are as they were written, not that they stand where they
were written: a file put together from others, or with a part twice, has whole frames too.
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
from offbeat.controller.group_table import GroupTable, Place
from offbeat.messages.groups import group_id


def contradiction(books: GroupTable, event: AnyEvent) -> str | None:  # noqa: C901, PLR0911, PLR0912 - the table of all events
    """What of these books the event cannot follow on; None: nothing."""
    match event:
        case Admitted():
            if event.ordinal != books.totals.drawn:
                return f"{group_id(event.ordinal)} is drawn, {books.totals.drawn} were drawn before"
        case Dispatched():
            return _group(books, event.ordinal, event.attempt - 1, (Place.ADMITTED,))
        case Committed():
            receipt = event.receipt
            return _group(books, receipt.ordinal, receipt.attempt, (Place.IN_FLIGHT,))
        case Returned():
            return _group(books, event.ordinal, event.attempt, (Place.IN_FLIGHT, Place.READY))
        case Dropped():
            return _group(
                books, event.ordinal, None, (Place.ADMITTED, Place.IN_FLIGHT, Place.READY)
            )
        case Claimed():
            problems = (_group(books, each, None, (Place.READY,)) for each in event.ordinals)
            return next((problem for problem in problems if problem), None)
        case StepIntent() | StepApplied() if books.rewinding_to is not None:
            return f"step {event.step} is taken during a rewind to version {books.rewinding_to}"
        case StepIntent():
            return _step(books, event.step, event.ordinals)
        case StepApplied():
            if event.version != books.trainer_version + 1:
                return f"version {event.version} is made of version {books.trainer_version}"
            return _step(books, event.step, event.ordinals) or _trained(books, event)
        case Rewound():
            return _rewind(books, event)
        case Opened():
            if books.run_id not in ("", event.run_id):
                return f"it is of run {event.run_id}, those before of run {books.run_id}"
        case _:
            pass
    return None


def _group(
    books: GroupTable, ordinal: int, attempt: int | None, places: Collection[Place]
) -> str | None:
    """What is wrong with a group that should be at one of these places, in this attempt."""
    group = books.groups.get(ordinal)
    if group is None:
        return f"{group_id(ordinal)} was never drawn, or has ended"
    if group.place not in places or attempt not in (None, group.attempt):
        return f"{group_id(ordinal)} is {group.place}, attempt {group.attempt}"
    return None


def _trained(books: GroupTable, event: StepApplied) -> str | None:
    """What is wrong with the attempts that a step says it has trained."""
    trained = dict(zip(event.ordinals, event.attempts, strict=False))
    if trained != {ordinal: group.attempt for ordinal, group in books.training.items()}:
        return f"step {event.step} is of other attempts than those that are training"
    return None


def _rewind(books: GroupTable, event: Rewound) -> str | None:
    """What is wrong with the steps that a rewind says it undoes."""
    now, to_version = books.trainer_version, event.to_version
    if to_version > now:
        return f"version {now} is rewound to {to_version}"
    if event.target > to_version:
        return f"a rewind to version {event.target} goes through version {to_version}"
    if [step.version for step in event.undone] != list(range(to_version + 1, now + 1)):
        return f"it undoes {len(event.undone)} steps from version {now} back to {to_version}"
    undone = (ordinal for step in event.undone for ordinal in step.ordinals)
    known = next((ordinal for ordinal in undone if ordinal in books.groups), None)
    if known is not None:
        return f"{group_id(known)} is undone, and was not trained"
    return next((problem for step in event.undone if (problem := _attempts(step))), None) or (
        _samples(books, event.undone)
    )


def _attempts(step: UndoneStep) -> str | None:
    """What is wrong with the attempts of the groups that an undone step has trained."""
    if len(step.attempts) != len(step.ordinals):
        return (
            f"version {step.version} has {len(step.ordinals)} groups, {len(step.attempts)} attempts"
        )
    return None


def _samples(books: GroupTable, undone: Iterable[UndoneStep]) -> str | None:
    """What is wrong with the samples that undone steps say they have trained."""
    samples = Counter[int]()
    for step in undone:
        for behind, count in step.staleness:
            samples[behind] += count
    for behind, count in samples.items():
        trained = books.steps.samples.get(behind, 0)
        if count > trained:
            return f"it undoes {count} samples of staleness {behind}, {trained} were trained"
    return None


def _step(books: GroupTable, step: int, ordinals: Collection[int]) -> str | None:
    if set(ordinals) != books.training.keys():
        return f"step {step} is of {len(ordinals)} groups, others are training"
    return None
