"""Steps that a rewind undoes, from the journal's events. Pure."""

from collections.abc import Iterable
from typing import NamedTuple

from offbeat.controller.events import Event, Rewound, StepApplied, UndoneStep
from offbeat.telemetry.applied_steps import WINDOW_STEPS


class StepsAfter(NamedTuple):
    """Steps after a version, and the rewards up to it."""

    undone: tuple[UndoneStep, ...]  # by version, rising
    rewards: tuple[float, ...]  # of the last steps up to that version, oldest first


def steps_after(version: int, newest_first: Iterable[Event]) -> StepsAfter:
    """Find the steps of the present lineage after ``version``.

    Reads back to the step that led to ``version``, and the window of rewards before it.

    Args:
        version: Target version of the rewind.
        newest_first: Events of the journal, backwards from the last one.
    """
    undone, rewards = list[UndoneStep](), list[float]()
    standing: int | None = None  # no step that made a later version stands; None: none was seen yet
    for event in newest_first:
        if isinstance(event, Rewound):
            standing = event.to_version if standing is None else min(standing, event.to_version)
        elif isinstance(event, StepApplied) and (standing is None or event.version <= standing):
            standing = event.version - 1
            if event.version > version:
                undone.append(event.undone())
            else:
                rewards.append(event.reward)
        if standing is not None and (
            not standing or (standing < version and len(rewards) == WINDOW_STEPS)
        ):
            break
    return StepsAfter(tuple(reversed(undone)), tuple(reversed(rewards)))
