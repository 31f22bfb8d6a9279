"""Settings with which a process finds the run directory, and its write location."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from offbeat.run_files.files import Files
from offbeat.run_files.shared_directory import RunDirToken


@dataclass(frozen=True, slots=True)
class Sharing:
    """Settings by which an actor checks whether it shares the run directory. Picklable."""

    token: RunDirToken
    node: str  # the driver's node
    files: str  # name of the actor that writes for others
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Environment variables that Ray must not show or log."""


@dataclass(frozen=True, slots=True)
class WriteLocation:
    """Location a process writes to. ``files`` is None for the run directory itself."""

    directory: Path
    files: Files | None = None
