"""Commands to a live run, through its run directory: they reach it over any file system it shares.

``offbeat control`` leaves a file; the driver, which looks at its run twice a second anyway, takes it
away and hands it to the controller.
"""

import os
import secrets
from pathlib import Path
from typing import Final

import msgspec

from offbeat.cli.run_directory import CONFIG, RunDirUnusable
from offbeat.controller.commands import Abort, Command, Pause, Resume, Stop

INBOX: Final = "control"
COMMANDS: Final[dict[str, Command]] = {
    "pause": Pause(),
    "resume": Resume(),
    "stop": Stop(),
    "abort": Abort("an operator asked"),
}


def leave(run_dir: Path, name: str) -> None:
    """Leave a command for the driver of this run.

    Raises:
        RunDirUnusable: It is no run's directory, or cannot be written.
    """
    if not (run_dir / CONFIG).exists():
        raise RunDirUnusable(str(run_dir), "it holds no run", "Name the directory of a live run")
    inbox = run_dir / INBOX
    try:
        inbox.mkdir(exist_ok=True)
        staged = inbox / f".{secrets.token_hex(4)}"
        staged.write_bytes(msgspec.json.encode(COMMANDS[name]))
        order = len(list(inbox.iterdir()))
        staged.rename(inbox / f"{order:06d}-{name}-{secrets.token_hex(2)}.json")
    except OSError as error:
        fix = "Ask on the machine that runs it"
        raise RunDirUnusable(str(run_dir), error.strerror or str(error), fix) from error


def taken(run_dir: Path) -> list[bytes]:
    """The commands left since the last look, oldest first; each is taken once."""
    inbox = run_dir / INBOX
    try:
        files = sorted(name for name in os.listdir(inbox) if name.endswith(".json"))
    except FileNotFoundError:
        return []
    found = list[bytes]()
    for name in files:
        found.append((inbox / name).read_bytes())
        (inbox / name).unlink()
    return found
