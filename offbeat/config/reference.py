"""``docs/configuration.md``, from the models: ``python -m offbeat.config.reference``."""

import textwrap
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from offbeat.config.schema import Key, choices, known_keys, only_with, read_doc

_COLUMNS: Final = 120
_HEAD: Final = """\
# Configuration

Generated from the models in `offbeat/config/` by `python -m offbeat.config.reference`; do not edit.

A recipe is a YAML file with these keys. `offbeat train RECIPE a.b.c=value ...` overrides them; the last value wins. A
recipe can start from another one: `extends: base.yaml`. Paths are relative to the file that names them, or to the
working directory in an override; `~` is the home directory. An unknown key is an error. `offbeat config explain KEY`
prints an entry of this page, `offbeat config show RECIPE` fills in all defaults, and `offbeat check RECIPE` finds
settings that cannot work together.

In brackets: the type, its range and the default. A key that accepts null is null by default, unless another default is
named. A NAME has letters, digits, dashes and underscores, and begins with a letter or digit. JSON values are text,
finite numbers, true, false, null, and lists or mappings of these.
"""

_SHORTER: Final = {
    "sections by name; a name consists of letters, digits, dashes and underscores, a letter or digit first": (
        "sections by NAME"
    ),
    "mapping, of text, finite numbers, true, false, null, and lists or mappings of these": (
        "mapping of JSON values"
    ),
    "one of ": "",
    ", at least ": ", >= ",
    ", at most ": ", <= ",
    ", above ": ", > ",
    ", below ": ", < ",
    "list of values, each: ": "list of ",
}
"""Words of a type in messages, and their form on the page, where the head explains them."""


def document() -> str:
    """Return the whole page."""
    chapters = [_section("", "Top level")]
    repeated = dict(_find_repeats())
    for section in (key for key in known_keys().values() if key.sections):
        if is_repeated(section.key):
            continue
        first = repeated.get(section.key)
        chapters.append(_chapter(section) if first is None else _reference(section, first))
    return _HEAD + "".join(chapters)


def is_repeated(key: str) -> bool:
    """Return whether a key is in a section with the same keys as an earlier section."""
    return any(key.startswith(f"{section}.") for section, _ in _find_repeats())


def _find_repeats() -> Iterator[tuple[str, str]]:
    """Yield each section with the models of an earlier section, and that section."""
    earlier = dict[tuple[type, ...], str]()
    for key in known_keys().values():
        if key.sections and (first := earlier.setdefault(key.sections, key.key)) != key.key:
            yield key.key, first


def _reference(section: Key, first: str) -> str:
    anchor = first.replace(".", "").lower()
    return f"\n## `{section.key}`\n\n" + _paragraph(
        f"{section.doc} It has the keys of [`{first}`](#{anchor})."
    )


def _chapter(section: Key) -> str:
    """Return the chapter of a section, with its choices if a key selects among them."""
    docs = [f"`{name}`: {read_doc(model)}" for name, model in choices(section.key).items()]
    only = f"Only with `{settings}`. " if (settings := only_with(section)) else ""
    intro = [f"{only}{section.doc}", *docs]
    return _section(f"{section.key}.", f"`{section.key}`", intro)


def _section(prefix: str, title: str, intro: Sequence[str] = ()) -> str:
    groups = dict[str, list[Key]]()
    for key in known_keys().values():
        if key.key == f"{prefix}{key.leaf}" and not key.sections:
            groups.setdefault(only_with(key) if key.variants else "", []).append(key)
    parts = [f"## {title}\n", *map(_paragraph, intro)]
    for settings, keys in sorted(groups.items(), key=lambda group: bool(group[0])):
        parts += [_paragraph(f"Only with `{settings}`:")] if settings else []
        parts.append("".join(map(_entry, keys)))
    return "\n" + "\n".join(parts)


def _entry(key: Key) -> str:
    kind = key.kind
    for words, shorter in _SHORTER.items():
        kind = kind.replace(words, shorter)
    default = key.default if key.required else f"default `{key.default}`"
    told = kind if kind.endswith(" or null") and key.default == "null" else f"{kind}; {default}"
    return _paragraph(f"- `{key.key}` ({told}): {key.doc}", indent="  ")


def _paragraph(text: str, indent: str = "") -> str:
    wrap = textwrap.TextWrapper(
        width=_COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return wrap.fill(text) + "\n"


def main() -> None:
    """Write the page; refuse arguments."""
    ArgumentParser(description=__doc__).parse_args()
    Path("docs/configuration.md").write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
