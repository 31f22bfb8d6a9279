"""Base of the parts of a run's state that pumps wait for."""

from collections.abc import Callable


class ObservableState:
    """State of which every assignment notifies whoever waits for a change.

    A pump assigns and cannot forget to notify. All assignments of one turn of the event loop cost
    the waiting tasks one look.
    """

    _changed: Callable[[], None]

    def __init__(self, changed: Callable[[], None]) -> None:
        object.__setattr__(self, "_changed", changed)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        self._changed()
