"""``docs/configuration.md``, from the models: ``python -m offbeat.config.reference``."""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from offbeat.config.schema import Key, choices, known_keys, only_with

_HEAD: Final = """\
# Configuration

Generated from the models in `offbeat/config/` by `python -m offbeat.config.reference`; do not edit.

A recipe is a YAML file of these keys; `offbeat train RECIPE a.b.c=value ...` lays further values over it, the last one
wins. A recipe may name another one to start from: `extends: base.yaml`. Paths are relative to the file that names them,
in an override to the working directory, and `~` is the home directory. An unknown key is an error. `offbeat config
explain KEY` says the same in the terminal, `offbeat config show RECIPE` fills all defaults in, and `offbeat check
RECIPE` finds settings that cannot work together.
"""


def document() -> str:
    """The whole page."""
    sections = [key for key in known_keys().values() if key.sections]
    return _HEAD + _section("", "Top level") + "".join(_chapter(key) for key in sections)


def _chapter(section: Key) -> str:
    """A section of recipes, with what its choices are if it is chosen by a key."""
    docs = [
        f"`{name}`: {' '.join((model.__doc__ or '').replace('``', '`').split())}"
        for name, model in choices(section.key).items()
    ]
    only = f"Only with `{settings}`. " if (settings := only_with(section)) else ""
    return _section(f"{section.key}.", f"`{section.key}`", [f"{only}{section.doc}", *docs])


def _section(prefix: str, title: str, intro: Sequence[str] = ()) -> str:
    keys = (key for key in known_keys().values() if key.key == f"{prefix}{key.leaf}")
    rows = [_row(key) for key in keys if not key.sections]
    table = ["| key | value | default | meaning |", "|---|---|---|---|", *rows]
    return "\n".join([f"\n## {title}\n", *(f"{line}\n" for line in intro), *table]) + "\n"


def _row(key: Key) -> str:
    only = f" Only with `{settings}`." if key.variants and (settings := only_with(key)) else ""
    default = key.default if key.required else f"`{key.default}`"
    cells = (f"`{key.key}`", key.kind, default, f"{key.doc}{only}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Write the page; refuse arguments."""
    ArgumentParser(description=__doc__).parse_args()
    Path("docs/configuration.md").write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
