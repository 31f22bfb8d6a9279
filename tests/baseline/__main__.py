"""Compare this tree with the recorded baseline: ``python -m tests.baseline [NAME ...] [--update]``.

A commit that claims no change of behaviour leaves every record as it is. ``--update`` writes the
records anew; the commit that does so says which behaviour changed, and why.
"""

import argparse
import difflib
import json
import multiprocessing
import sys
from pathlib import Path

from tests.baseline.commands import (
    checked_recipes,
    exit_codes,
    explained_keys,
    generated_pages,
    refused_recipes,
)
from tests.baseline.deterministic import deterministic_run
from tests.baseline.episodes import auditor_digests, controller_digests

RECORDS = Path(__file__).parent / "records"
RECORDERS = {
    "controller": controller_digests,
    "auditor": auditor_digests,
    "recipes": checked_recipes,
    "refusals": refused_recipes,
    "keys": explained_keys,
    "commands": exit_codes,
    "pages": generated_pages,
    "deterministic": deterministic_run,
}
SHOWN_LINES = 40


def main() -> int:
    """Record the chosen parts, compare each with its file, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.baseline", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECORDERS)}")
    parser.add_argument("--update", action="store_true", help="write the records anew")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(RECORDERS)):
        parser.error(f"no record is named {', '.join(unknown)}; there are {', '.join(RECORDERS)}")
    differing = [
        name
        for name in arguments.names or RECORDERS
        if not _agrees(name, _record(name), update=arguments.update)
    ]
    return 1 if differing else 0


def _record(name: str) -> dict[str, object]:
    """Record one part in its own process: commands leave loggers and progress bars behind."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(RECORDERS[name])


def _agrees(name: str, now: dict[str, object], *, update: bool) -> bool:
    file = RECORDS / f"{name}.json"
    text = json.dumps(now, indent=1, ensure_ascii=False) + "\n"
    if update:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
        _say(f"{name}: {len(now)} entries written")
        return True
    before = file.read_text(encoding="utf-8")
    if before == text:
        _say(f"{name}: {len(now)} entries as recorded")
        return True
    lines = difflib.unified_diff(
        before.splitlines(), text.splitlines(), "recorded", "now", n=1, lineterm=""
    )
    changed = [*lines]
    more = max(0, len(changed) - SHOWN_LINES)
    _say(
        f"{name}: differs",
        *changed[:SHOWN_LINES],
        *([f"... and {more} more lines"] if more else ()),
    )
    return False


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
