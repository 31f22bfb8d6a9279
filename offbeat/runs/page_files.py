"""Lists the files for the page of a run. None of them may be a symbolic link.

A run directory may come from another user, and readers pass a page on. A link in the directory
would put a file from the reader's machine on the page.

Also reads values of a run's ``config.yaml`` by dotted key. That file is not trusted. By aliases of
aliases or by nested collections, a short YAML text can expand to an endless tree or to terabytes.
No run writes such a text, so it is refused before anything is built from it.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# PyYAML has types for few of its methods.

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import yaml
from yaml.composer import ComposerError

from offbeat.messages.failures import OffbeatError
from offbeat.run_files.files import FAILURES
from offbeat.run_files.limits import CONFIG_BYTES, CONFIG_DEPTH, CONFIG_KEYS, read_limited
from offbeat.runs.directory import CONFIG, JOURNAL, SUMMARY, leaves
from offbeat.runs.inputs import TOKENIZER
from offbeat.telemetry.status_file import STATUS_FILE

METRICS: Final = "metrics.jsonl"
_READ: Final = (CONFIG, SUMMARY, METRICS, STATUS_FILE, TOKENIZER, FAILURES)
_FOLDERS: Final = (JOURNAL, "rollouts", "evaluations")
_CHECKPOINTS: Final = "checkpoints"


class LinkRefused(OffbeatError):
    """A file for the page of a run is a symbolic link.

    Fix: replace the link by its target.
    """

    path: str

    def __str__(self) -> str:
        return (
            f"{self.path} is a symbolic link, which pages and exports of a run never follow: it may "
            "lead to any file of this machine. Replace it by its target, or remove it"
        )


def page_files(run_dir: Path) -> Iterator[Path]:
    """Yield every file and folder of a run that the page may read, including missing ones."""
    yield from (run_dir / name for name in (*_READ, *_FOLDERS, _CHECKPOINTS))
    for folder in _FOLDERS:
        if (run_dir / folder).is_dir():
            yield from (run_dir / folder).iterdir()
    yield from (run_dir / _CHECKPOINTS).glob("step_*")
    yield from (run_dir / _CHECKPOINTS).glob(f"step_*/{TOKENIZER}")


def check_no_links(run_dir: Path) -> None:
    """Check the files of a run before they are put on a page.

    Raises:
        LinkRefused: One of them is a symbolic link. (The run directory itself may be one.)
    """
    for path in page_files(run_dir):
        if path.is_symlink():
            raise LinkRefused(str(path))


def check_not_linked(folder: Path, tool: str) -> None:
    """Check that no name in ``folder`` that a tool writes, such as ``wandb``, is a link.

    Raises:
        LinkRefused: One is a symbolic link.
    """
    for path in folder.glob(f"{tool}*"):
        if path.is_symlink():
            raise LinkRefused(str(path))


class _PlainLoader(yaml.SafeLoader):
    """Refuses aliases, and trees deeper than any recipe."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:  # noqa: ANN401 -- a position or a key
        problem = ""
        if self.check_event(yaml.AliasEvent):
            problem = "an alias, which no run writes"
        elif self._depth >= CONFIG_DEPTH:
            problem = f"deeper than {CONFIG_DEPTH} levels"
        if problem:
            raise ComposerError(problem=problem, problem_mark=self.peek_event().start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def recipe_values(path: Path) -> dict[str, object]:
    """Return the values of a recipe by dotted key.

    Raises:
        OSError: The file cannot be read.
        FileTooLarge: The file is larger than any file that a run writes.
        NoRegularFile: The file is a pipe, a socket or a device.
        yaml.YAMLError: The file is not YAML, or has a tree that no run writes.
    """
    tree: object = yaml.load(read_limited(path, CONFIG_BYTES), _PlainLoader)  # noqa: S506 -- a SafeLoader
    return dict(islice(leaves(tree), CONFIG_KEYS))


def readable_values(path: Path) -> dict[str, object]:
    """Return the values of a recipe by dotted key, or none if the file cannot be read."""
    try:
        return recipe_values(path)
    except (OSError, OffbeatError, yaml.YAMLError, UnicodeDecodeError):
        return {}
