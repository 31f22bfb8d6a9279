"""What a staleness policy sees, and what it may say."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

NEVER = -1
"""The stamp of a group that is bound to no particular step."""


class ReadyGroup(Protocol):
    """A group that could be trained now."""

    @property
    def ordinal(self) -> int: ...
    @property
    def stamp(self) -> int:
        """Target step given at admission, or ``NEVER``."""
        ...

    @property
    def bound_version(self) -> int:
        """Weight version of its oldest token."""
        ...


@dataclass(frozen=True, slots=True)
class View:
    """The ledger as a policy sees it. Versions are weight versions; counts are prompt groups."""

    trainer_version: int
    serving_version: int  # lowest version a serving generator samples under
    quota: int  # groups the step in progress still needs
    waiting: int  # admitted, not at an engine: will be sampled at serving_version or later
    versions: Mapping[int, int]  # groups in flight or ready, by the version that bounds them
    stamped: Mapping[int, int]  # groups still to be claimed, by target step
    shrunk: Mapping[int, int]  # groups a step goes without, by step
    ready: Iterable[ReadyGroup]  # in arrival order

    @property
    def outstanding(self) -> int:
        """Groups that still have to be claimed."""
        return self.waiting + sum(self.versions.values())


class Sampler(Protocol):
    """A staleness policy.

    Its promise: if every admitted group is either claimed as ``select`` says or leaves by a failure,
    every token trained is at most ``max_staleness`` versions old.
    """

    @property
    def max_staleness(self) -> int: ...

    @property
    def reach(self) -> int:
        """Most groups that can be admitted and not yet trained."""
        ...

    def admit(self, view: View) -> int | None:
        """The stamp of one more group, or None when there is no room for it now."""
        ...

    def select(self, view: View) -> list[int]:
        """Ordinals to claim now for the step in progress, at most ``view.quota`` of them."""
        ...

    def stale(self, view: View) -> list[int]:
        """Ordinals of ready groups that are past the bound and can never be trained."""
        ...


def past_bound(view: View, max_staleness: int) -> list[int]:
    """Ready groups whose oldest token is more than ``max_staleness`` versions behind the trainer."""
    oldest_allowed = view.trainer_version - max_staleness
    if not any(version < oldest_allowed for version in view.versions):
        return []
    return [group.ordinal for group in view.ready if group.bound_version < oldest_allowed]
