"""Planned faults as data: drawn by a campaign, read from a file, or replayed by a live test."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from offbeat.controller.failpoints import Failpoint


class PlannedFault(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One planned fault, due at exactly one of: a step, a failpoint, a journal record."""

    action: str  # a name of offbeat.plugins.simulation.faults.KINDS
    # generator-1, environment-0, trainer, controller; of a bucket also its sender, as in trainer
    # rank 2; empty: the first possible target
    target: str = ""
    at_step: int | None = None  # the trainer has applied this many steps; 0: from the start
    failpoint: str | None = None  # a value of offbeat.controller.failpoints.Failpoint
    at_record: int | None = None  # number of journal records written
    nth: int = 1  # ordinal of the failpoint's occurrence, over all incarnations of the controller
    delay_s: float = 0.0  # delay of the fault after it is due

    def __post_init__(self) -> None:
        when = (self.at_step, self.failpoint, self.at_record)
        if sum(each is not None for each in when) != 1:
            raise ValueError(
                f"{self.action} needs exactly one of at_step, failpoint and at_record; "
                f"it has {when}"
            )
        if self.failpoint is not None and self.failpoint not in set(Failpoint):
            known = ", ".join(Failpoint)
            raise ValueError(f"no failpoint is named {self.failpoint!r}; there are {known}")
        if min(self.at_step or 0, self.delay_s) < 0 or self.nth < 1 or self.at_record == 0:
            raise ValueError(
                f"{self.action} cannot be due: at_step and delay_s count from 0, nth and at_record "
                "from 1"
            )


def dump(planned_faults: Sequence[PlannedFault]) -> str:
    """Serialise planned faults as JSON, one per line."""
    lines = ",\n ".join(msgspec.json.encode(strike).decode() for strike in planned_faults)
    return f"[{lines}]\n"


def load(text: str | bytes) -> list[PlannedFault]:
    """Parse planned faults from a JSON list.

    Raises:
        msgspec.ValidationError: It is not such a list.
    """
    return msgspec.json.decode(text, type=list[PlannedFault])


def read(path: Path) -> list[PlannedFault]:
    """Read planned faults from a file."""
    return load(path.read_bytes())
