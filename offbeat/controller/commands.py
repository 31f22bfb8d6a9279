"""Defines the commands that an operator can send to a running controller."""

import msgspec


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Start no rollout and no step. Work in progress is finished."""


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Continue after a pause."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Stop after the step in progress if its batch is complete, else discard that step and stop."""

    reason: str = "offbeat control stop"
    """Cause of the early end, for ``Summary.ended_by``."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End now. Groups in flight are lost."""

    reason: str


Command = Pause | Resume | Stop | Abort
