"""Keeps what an operator has requested of a run. Pure."""

from collections import deque
from collections.abc import Callable

from offbeat.controller.commands import Command, Stop


class Operator:
    """The operator's commands, oldest first, and what those carried out have left in force.

    Every change notifies whoever waits for one.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._inbox = deque[Command]()
        self._is_paused = False
        self._ended_by = ""

    @property
    def is_paused(self) -> bool:
        """Return whether no step begins and no rollout is dispatched; the open step goes on."""
        return self._is_paused

    @property
    def is_stopping(self) -> bool:
        """Return whether the run ends after the step in progress."""
        return bool(self._ended_by)

    @property
    def ended_by(self) -> str:
        """Return what stops the run before its last step; empty if nothing does."""
        return self._ended_by

    def send(self, command: Command) -> None:
        """Put a command behind those that are not carried out yet."""
        self._inbox.append(command)
        self._changed()

    def has_command(self) -> bool:
        """Return whether a command waits to be carried out."""
        return bool(self._inbox)

    def next_command(self) -> Command:
        """Take out the oldest command; there must be one."""
        return self._inbox.popleft()

    def pause(self) -> None:
        self._is_paused = True
        self._changed()

    def resume(self) -> None:
        self._is_paused = False
        self._changed()

    def stop(self, reason: str = Stop().reason) -> None:
        """Have the run end after the step in progress. The first reason is the one that is kept."""
        self._ended_by = self._ended_by or reason
        self._changed()
