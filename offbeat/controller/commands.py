"""Defines the commands that an operator can send to a running controller."""

import msgspec


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Dispatch nothing and begin no step; what goes on goes to its end."""


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Go on after a pause."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End normally: after the step in progress if its batch is complete, else without that step."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End now; groups in flight are lost."""

    reason: str


Command = Pause | Resume | Stop | Abort
