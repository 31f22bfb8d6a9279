"""What a process needs to reach the run directory, and where it writes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from offbeat.run_files.files import Files
from offbeat.run_files.place import RunDirToken


@dataclass(frozen=True, slots=True)
class Sharing:
    """What an actor needs to find out whether it sees the run directory. Picklable."""

    token: RunDirToken
    node: str  # of the driver
    files: str  # name of the actor that writes for others
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Environment variables that Ray is not to show or log."""


@dataclass(frozen=True, slots=True)
class WriteLocation:
    """Where a process writes. ``files`` is None where that is the run directory itself."""

    directory: Path
    files: Files | None = None
