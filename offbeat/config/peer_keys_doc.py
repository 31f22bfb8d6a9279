"""Generates ``docs/peer-keys.md`` from the tables of other libraries' keys.

Usage: ``python -m offbeat.config.peer_keys_doc``.
"""

from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from typing import Final

from offbeat.config.peer_tables import NOTES, PEER_KEYS

_WIDTH: Final = 120
_HEAD: Final = """\
# Keys of other libraries

Generated from `offbeat/config/peer_tables.py` by `python -m offbeat.config.peer_keys_doc`; do not edit.

`offbeat check` names the matching keys for your whole file, and `offbeat config explain KEY` for one key. Here a flag
such as `--rollout-batch-size` is written with underscores. [Coming from another library](coming-from.md#what-differs)
lists differences in meaning.
"""
_NOTES: Final = """
## Keys with a different meaning, or without a counterpart

Keys are listed without their prefixes.

"""


def document() -> str:
    """Return the whole page."""
    tables = "".join(_table(library, keys) for library, keys in PEER_KEYS.items())
    return f"{_HEAD}{tables}{_NOTES}" + "\n".join(_list_notes()) + "\n"


def _table(library: str, keys: dict[str, tuple[str, ...]]) -> str:
    rows = [
        f"| `{peer}` | {', '.join(f'`{each}`' for each in ours)} |" for peer, ours in keys.items()
    ]
    return "\n".join([f"\n## {library}\n", f"| {library} | offbeat |", "|---|---|", *rows]) + "\n"


def _list_notes() -> Iterator[str]:
    """Yield an entry per note, with all its keys."""
    by_note = dict[str, list[str]]()
    for peer, note in NOTES.items():
        by_note.setdefault(note, []).append(peer)
    for note, peers in by_note.items():
        entry = f"- {', '.join(f'`{peer}`' for peer in peers)}: {note}"
        yield fill(
            entry,
            _WIDTH,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )


def main() -> None:
    """Write the page; refuse arguments."""
    ArgumentParser(description=__doc__).parse_args()
    Path("docs/peer-keys.md").write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
