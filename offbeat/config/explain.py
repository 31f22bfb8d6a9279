"""Explains a key of a recipe, for ``offbeat config explain``."""

from textwrap import indent

from offbeat.config import schema
from offbeat.config.normalise import meant
from offbeat.config.run import RunConfig
from offbeat.messages.failures import OffbeatError


class NoSuchKey(OffbeatError):
    """A key that no recipe has."""

    key: str
    hint: str

    def __str__(self) -> str:
        return f"{self.key}: unknown key. {self.hint}"


def explain(key: str = "") -> str:
    """Type, range, default and meaning of a dotted key; of a section, all that is in it.

    The last part of a key suffices if no other key ends with it.

    Raises:
        NoSuchKey: With the nearest one.
    """
    if not key:
        doc = RunConfig.__doc__ or ""
        return f"{doc.strip()}\n\n{_table('')}"
    known = schema.known(key)
    if known is None and (whole := _find_by_last_part(key)):
        return explain(whole)
    if known is None:
        place, _, _ = key.rpartition(".")
        raise NoSuchKey(key, meant(key, [other.leaf for other in schema.children(place)]))
    if known.sections:
        docs = [
            " ".join((section.__doc__ or "").replace("``", "`").split())
            for section in known.sections
        ]
        head = f"{key}: {known.doc}{_only(known)}"
        return "\n".join([head, *_choices(known, docs), "", _table(known.key)])
    return f"{key}: {known.summary}\n    {known.doc}{_only(known)}"


def _find_by_last_part(part: str) -> str:
    """Return the one key whose last part this is, else ``""``."""
    found = [key.key for key in schema.known_keys().values() if key.leaf == part]
    return found[0] if len(found) == 1 else ""


def _only(key: schema.Key) -> str:
    settings = schema.only_with(key)
    return f"\n    Only with {settings}." if settings else ""


def _choices(section: schema.Key, docs: list[str]) -> list[str]:
    names = schema.choices(section.key)
    return [f"    {name}: {doc}" for name, doc in zip(names, docs, strict=True)] if names else []


def _table(place: str) -> str:
    """Format one entry per key; sections below are only named."""
    entries = [f"{key.key}\n{indent(_entry(key), '    ')}" for key in schema.children(place)]
    return "\n".join(entries)


def _entry(key: schema.Key) -> str:
    if key.sections:
        return f"{key.doc} (section: offbeat config explain {key.key})"
    return f"{key.summary}\n{key.doc}{_only(key)}"
