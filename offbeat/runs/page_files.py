"""Files of a run directory that its page is made of. None of them may be a symbolic link.

A run directory may come from somebody else, and a page is passed on: a link in it would put a file
of its reader's machine on the page.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from offbeat.messages.failures import OffbeatError
from offbeat.runs.directory import CONFIG, JOURNAL, SUMMARY
from offbeat.runs.inputs import TOKENIZER
from offbeat.telemetry.status_file import STATUS_FILE

METRICS: Final = "metrics.jsonl"
_READ: Final = (CONFIG, SUMMARY, METRICS, STATUS_FILE, TOKENIZER)
_FOLDERS: Final = (JOURNAL, "rollouts")
_CHECKPOINTS: Final = "checkpoints"


class LinkRefused(OffbeatError):
    """A file that the page of a run would be made of is a symbolic link."""

    path: str

    def __str__(self) -> str:
        return (
            f"{self.path} is a symbolic link, which no page of a run follows: it may lead to any file "
            "of this machine. Put what it leads to in its place, or remove it"
        )


def page_files(run_dir: Path) -> Iterator[Path]:
    """Yield every file and folder of a run that the page may read, also those that do not exist."""
    yield from (run_dir / name for name in (*_READ, *_FOLDERS, _CHECKPOINTS))
    for folder in _FOLDERS:
        if (run_dir / folder).is_dir():
            yield from (run_dir / folder).iterdir()
    yield from (run_dir / _CHECKPOINTS).glob("step_*")
    yield from (run_dir / _CHECKPOINTS).glob(f"step_*/{TOKENIZER}")


def check_no_links(run_dir: Path) -> None:
    """Check the files of a run before a page is made of them.

    Raises:
        LinkRefused: One of them is a symbolic link. The run directory itself may be one.
    """
    for path in page_files(run_dir):
        if path.is_symlink():
            raise LinkRefused(str(path))
