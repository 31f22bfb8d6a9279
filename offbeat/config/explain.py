"""Explains a key of a recipe, for ``offbeat config explain``."""

from textwrap import indent
from typing import Final

from offbeat.config import schema
from offbeat.config.normalise import meant
from offbeat.config.plugin_sections import section_of_plugin
from offbeat.config.run import RunConfig
from offbeat.doors import PluginUnusable
from offbeat.messages.failures import OffbeatError

_PLUGINS: Final = "plugins"  # key of the sections of other packages


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
    if known is None and key.startswith(f"{_PLUGINS}."):
        return _explain_plugin(key)
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


def _explain_plugin(key: str) -> str:
    """Explain the section of a plug-in from another package, or a key of it."""
    name = key.split(".")[1]
    try:
        section = section_of_plugin(name)
    except PluginUnusable as unusable:
        raise NoSuchKey(key, f"{unusable}.") from None
    keys = {each.key: each for each in schema.keys_of(section, f"{_PLUGINS}.{name}.")}
    if key in keys:
        return f"{key}: {keys[key].summary}\n    {keys[key].doc}"
    if key != f"{_PLUGINS}.{name}":
        raise NoSuchKey(key, f"{name} has the keys {', '.join(section.model_fields)}.")
    doc = " ".join((section.__doc__ or "").replace("``", "`").split())
    entries = [f"{each.key}\n{indent(_entry(each), '    ')}" for each in keys.values()]
    return "\n".join([f"{key}: {doc}", "", *entries])


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
