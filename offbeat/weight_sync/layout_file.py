"""The layout of a run's engines as a file of its run directory, for plans beside the run."""

import os
from pathlib import Path
from typing import Final

import msgspec

from offbeat.messages.failures import OffbeatError
from offbeat.weight_sync.engine_layout import EngineLayout

LAYOUT_FILE: Final = "engine_layout.msgpack"


class NoRecordedLayout(OffbeatError):
    """A path that holds no layout of engines."""

    path: str
    problem: str

    def __str__(self) -> str:
        return (
            f"{self.path} holds no recorded layout: {self.problem}. Name the directory of a run with "
            "generator.backend=vllm and sync.transport=reshard, whose first engine records it"
        )


def write_layout(layout: EngineLayout, run_dir: Path) -> None:
    """Write the layout of one engine, which is that of all; the last that writes stays.

    Raises:
        OSError: The disk cannot write.
    """
    staged = run_dir / f".{LAYOUT_FILE}.{os.getpid()}"
    staged.write_bytes(msgspec.msgpack.encode(layout))
    staged.replace(run_dir / LAYOUT_FILE)


def read_layout(path: Path) -> EngineLayout:
    """Read the layout in a run directory, or in a file.

    Raises:
        NoRecordedLayout: There is none, or the file is something else.
    """
    file = path / LAYOUT_FILE if path.is_dir() else path
    try:
        layout = msgspec.msgpack.decode(file.read_bytes(), type=EngineLayout)
    except (OSError, msgspec.DecodeError) as error:
        raise NoRecordedLayout(str(file), str(error)) from error
    if not layout.ranks:
        raise NoRecordedLayout(str(file), "it names no rank")
    return layout
