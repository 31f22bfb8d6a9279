"""Explains a key of a recipe, for ``offbeat config explain``."""

from collections.abc import Iterator
from textwrap import indent
from typing import Final

from offbeat.config import schema
from offbeat.config.base import Config
from offbeat.config.normalise import meant
from offbeat.config.package_keys import (
    BACKEND,
    GENERATOR,
    EngineKey,
    find_engines,
    installed_names,
    is_of_every_engine,
)
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

    The last part of a key suffices if no other key ends with it. A package of others is imported
    where it alone has the answer: its tracker for the section of that, its engine for section
    ``generator`` and for keys there that not every engine has.

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
    if known is None and key.startswith(f"{GENERATOR}."):
        return _explain_engine_key(key)
    if known is None:
        place, _, _ = key.rpartition(".")
        raise NoSuchKey(key, meant(key, [other.leaf for other in schema.children(place)]))
    if known.sections:
        docs = [_doc_of(section) for section in known.sections]
        head = f"{key}: {known.doc}{_only(known)}"
        choices, own = _choices(known, docs), list[str]()
        if key == GENERATOR:
            choices, own = [*choices, *_engines_of_packages()], [*_keys_of_packages()]
        return "\n".join([head, *choices, "", _table(known.key), *own])
    return f"{key}: {known.summary}\n    {known.doc}{_installed(known)}{_only(known)}"


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
    doc = _doc_of(section)
    entries = [f"{each.key}\n{indent(_entry(each), '    ')}" for each in keys.values()]
    return "\n".join([f"{key}: {doc}", "", *entries])


def _find_by_last_part(part: str) -> str:
    """Return the one key whose last part this is, else ``""``."""
    found = [key.key for key in schema.known_keys().values() if key.leaf == part]
    return found[0] if len(found) == 1 else ""


def _explain_engine_key(key: str) -> str:
    """Explain a key of section ``generator`` that engines of other packages alone have."""
    found = find_engines()
    forms = [each for each in found.keys if each.key.key == key]
    if not forms:
        place, _, _ = key.rpartition(".")
        below = [each.key for each in found.keys if each.key.key.rpartition(".")[0] == place]
        valid = {each.leaf for each in (*schema.children(place), *below)}
        hint = " ".join([meant(key, valid), *(f"{each}." for each in found.unusable.values())])
        raise NoSuchKey(key, hint)
    heads = [f"{key}: {_engine_entry(each, '    ')}" for each in forms]
    below = [each for each in found.keys if each.key.key.startswith(f"{key}.")]
    return "\n".join([*heads, *([""] if below else []), *map(_in_table, below)])


def _engines_of_packages() -> Iterator[str]:
    """Yield the meaning of each engine that another package brings, or why it is unknown."""
    found = find_engines()
    yield from (f"    {name}: {_doc_of(section)}" for name, section in found.sections.items())
    yield from (f"    {name}: unusable. {each}." for name, each in found.unusable.items())


def _keys_of_packages() -> Iterator[str]:
    """Yield the keys of section ``generator`` that engines of other packages alone have."""
    yield from (
        _in_table(each) for each in find_engines().keys if schema.known(each.key.key) is None
    )


def _in_table(found: EngineKey) -> str:
    return f"{found.key.key}\n{indent(_engine_entry(found), '    ')}"


def _engine_entry(found: EngineKey, margin: str = "") -> str:
    """Format a key as the engines of other packages have it; ``margin`` begins its further lines."""
    key, only = found.key, f"Only with {BACKEND}={' or '.join(found.engines)}."
    lines = [key.doc] if key.sections else [key.summary, key.doc]
    return f"\n{margin}".join([*lines, only] if margin else [*lines, f"    {only}"])


def _installed(key: schema.Key) -> str:
    """Format the names that packages of others bring for a key."""
    names = [f"{name} ({package})" for name, package in installed_names(key.key).items()]
    return f"\n    Of installed packages: {', '.join(names)}." if names else ""


def _only(key: schema.Key) -> str:
    settings = schema.only_with(key)
    if not settings:
        return ""
    if not settings.startswith(f"{BACKEND}="):
        return f"\n    Only with {settings}."
    names, notes = _engines_with(key)
    return "\n    ".join(["", f"Only with {' or '.join([settings, *names])}.", *notes])


def _engines_with(key: schema.Key) -> tuple[list[str], list[str]]:
    """Return the engines of other packages that have a key of section ``generator``, and notes on them."""
    installed = [*installed_names(BACKEND)]
    if not installed:
        return [], []
    if is_of_every_engine(key.key):
        return installed, [f"Another package may set another default: {', '.join(installed)}."]
    found = find_engines()
    forms = [each for each in found.keys if each.key.key == key.key]
    names = [name for each in forms for name in each.engines]
    others = [each for each in forms if (each.key.summary, each.key.doc) != (key.summary, key.doc)]
    notes = [
        f"With {BACKEND}={' or '.join(each.engines)}: {each.key.summary}. {each.key.doc}"
        for each in others
    ]
    return names, [*notes, *(f"{each}." for each in found.unusable.values())]


def _doc_of(section: type[Config]) -> str:
    return " ".join((section.__doc__ or "").replace("``", "`").split())


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
    return f"{key.summary}\n{key.doc}{_installed(key)}{_only(key)}"
