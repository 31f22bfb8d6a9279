"""What a journal says of the steps so far: the measures of a run that outlive its controllers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from offbeat.controller.events import AnyEvent, Committed, Rewound, StepApplied
from offbeat.messages.groups import Receipt


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One applied step that no rewind has undone."""

    step: int
    version: int  # it made
    receipts: tuple[Receipt, ...]


def trained_steps(events: Iterable[AnyEvent]) -> Iterator[TrainedStep]:
    """The steps that count, oldest first, each with the receipts of what it trained."""
    receipts: dict[int, Receipt] = {}
    steps: dict[int, TrainedStep] = {}
    for event in events:
        match event:
            case Committed():
                receipts[event.receipt.ordinal] = event.receipt
            case StepApplied():
                trained = tuple(receipts.pop(ordinal) for ordinal in event.ordinals)
                steps[event.version] = TrainedStep(event.step, event.version, trained)
            case Rewound():
                for version in [made for made in steps if made > event.to_version]:
                    del steps[version]
            case _:
                pass
    yield from steps.values()
