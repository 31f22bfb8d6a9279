"""Whether an event of a journal can have followed those before it. Pure.

The checksum of a frame says that its bytes are as they were written, not that they stand where they
were written: a file put together from others, or with a part twice, has whole frames too.
"""

from collections.abc import Collection

from offbeat.controller.books import Books, Place
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
)
from offbeat.messages.groups import group_id


def contradiction(books: Books, event: AnyEvent) -> str | None:  # noqa: C901, PLR0911, PLR0912 - the table of all events
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
        case StepIntent():
            return _step(books, event.step, event.ordinals)
        case StepApplied():
            if event.version != books.trainer_version + 1:
                return f"version {event.version} is made of version {books.trainer_version}"
            return _step(books, event.step, event.ordinals)
        case Rewound():
            if event.to_version > books.trainer_version:
                return f"version {books.trainer_version} is rewound to {event.to_version}"
        case Opened():
            if books.run_id not in ("", event.run_id):
                return f"it is of run {event.run_id}, those before of run {books.run_id}"
        case _:
            pass
    return None


def _group(
    books: Books, ordinal: int, attempt: int | None, places: Collection[Place]
) -> str | None:
    """What is wrong with a group that should be at one of these places, in this attempt."""
    group = books.groups.get(ordinal)
    if group is None:
        return f"{group_id(ordinal)} was never drawn, or has ended"
    if group.place not in places or attempt not in (None, group.attempt):
        return f"{group_id(ordinal)} is {group.place}, attempt {group.attempt}"
    return None


def _step(books: Books, step: int, ordinals: Collection[int]) -> str | None:
    if set(ordinals) != books.training.keys():
        return f"step {step} is of {len(ordinals)} groups, others are training"
    return None
