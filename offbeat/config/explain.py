"""Explains a key of a recipe, for ``offbeat config explain``."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from textwrap import indent
from typing import Final, NamedTuple

from offbeat.config import schema
from offbeat.config.engine_plugin import find_engine
from offbeat.config.normalise import meant
from offbeat.config.package_names import list_installed_names
from offbeat.config.peer_keys import matching_keys
from offbeat.config.plugin_sections import section_of_plugin
from offbeat.config.run import RunConfig
from offbeat.config.sections.generator import PluginGeneratorConfig
from offbeat.doors import PluginUnusable
from offbeat.messages.failures import OffbeatError

_PLUGINS: Final = "plugins"  # section key of other packages
_GENERATOR: Final = "generator"  # section that an engine provides
_BACKEND: Final = f"{_GENERATOR}.backend"  # key that selects an engine


class NoSuchKey(OffbeatError):
    """A key that no recipe has.

    Fix: use the suggested key.
    """

    key: str
    hint: str

    def __str__(self) -> str:
        return f"{self.key}: unknown key. {self.hint}"


def explain(key: str = "") -> str:
    """Return type, range, default and meaning of a dotted key, or all keys of a section.

    The last part of a key suffices if no other key ends with it. Blanks around a key are ignored,
    and dashes stand for underscores, except in names that a recipe chooses. Other packages are imported only
    if they are needed for the answer: a tracker for its section, and engines for section
    ``generator`` and for its keys that only some engines have.

    Raises:
        NoSuchKey: It names the nearest key.
    """
    key = _spell(key.strip())
    if not key:
        doc = RunConfig.__doc__ or ""
        return f"{doc.strip()}\n\n{_table(schema.children(''))}"
    known = schema.known(key)
    if known is None and (whole := _find_by_last_part(key)):
        others = " or ".join(f"`{each}`" for each in matching_keys(key, least=2))
        also = f"\n    `{key}` of another library is {others} here." if others else ""
        return f"{explain(whole)}{also}"
    if known is None and key.startswith(f"{_PLUGINS}."):
        return _explain_plugin(key)
    if known is None and key.startswith(f"{_GENERATOR}."):
        return _explain_engine_key(key)
    if known is None:
        place, _, _ = key.rpartition(".")
        raise NoSuchKey(key, meant(key, [other.leaf for other in schema.children(place)]))
    head = f"{key}: {_entry(known, _notes(known), '    ')}"
    if not known.sections:
        return head
    choices = [f"    {name}: {schema.read_doc(each)}" for name, each in schema.choices(key).items()]
    engines = [*_engines_of_packages()] if key == _GENERATOR else []
    own = [*_keys_of_packages()] if key == _GENERATOR else []
    return "\n".join([head, *choices, *engines, "", _table(schema.children(known.key)), *own])


def _spell(key: str) -> str:
    """Return a key with its dashes turned into underscores, except in the name of a plug-in."""
    if schema.known(key) is not None:
        return key  # a dash in it belongs to a name that a recipe chose
    section, _, below = key.partition(".")
    if section != _PLUGINS:
        return key.replace("-", "_")
    name, dot, own = below.partition(".")
    return f"{section}.{name}{dot}{own.replace('-', '_')}" if name else key


def _explain_plugin(key: str) -> str:
    """Explain the section of a plug-in from another package, or a key of it."""
    name = key.split(".")[1]
    try:
        section = section_of_plugin(name)
    except PluginUnusable as unusable:
        raise NoSuchKey(key, f"{unusable}.") from None
    keys = {each.key: each for each in schema.list_keys(section, f"{_PLUGINS}.{name}.")}
    if key in keys:
        return f"{key}: {_entry(keys[key], margin='    ')}"
    if key != f"{_PLUGINS}.{name}":
        raise NoSuchKey(key, f"{name} has the keys {', '.join(section.model_fields)}.")
    return f"{key}: {schema.read_doc(section)}\n\n{_table(keys.values())}"


def _find_by_last_part(part: str) -> str:
    """Return the only key with this last part, else ``""``."""
    found = [key.key for key in schema.known_keys().values() if key.leaf == part]
    return found[0] if len(found) == 1 else ""


def _table(keys: Iterable[schema.Key]) -> str:
    """Format one entry per key. Sections below are only named."""
    return "\n".join(
        _in_table(
            each,
            f" (section: offbeat config explain {each.key})" if each.sections else _notes(each),
        )
        for each in keys
    )


def _in_table(key: schema.Key, notes: str) -> str:
    return f"{key.key}\n{indent(_entry(key, notes), '    ')}"


def _entry(key: schema.Key, notes: str = "", margin: str = "") -> str:
    """Format type, default and meaning of a key. ``margin`` starts the line of its meaning."""
    return f"{key.doc}{notes}" if key.sections else f"{key.summary}\n{margin}{key.doc}{notes}"


def _notes(key: schema.Key) -> str:
    """Format the names that other packages add to a key, and the settings that the key needs."""
    names = [f"{name} ({package})" for name, package in list_installed_names(key.key).items()]
    notes = [f"Of installed packages: {', '.join(names)}."] if names else []
    settings = schema.only_with(key)
    if settings.startswith(f"{_BACKEND}="):
        engines, of_engines = _engines_with(key)
        notes += [f"Only with {' or '.join([settings, *engines])}.", *of_engines]
    elif settings:
        notes.append(f"Only with {settings}.")
    return "".join(f"\n    {note}" for note in notes)


# --- engines of packages ---------------------------------------------------------------------------


class PackageEngines(NamedTuple):
    """Engines of installed packages, imported."""

    sections: Mapping[str, type[PluginGeneratorConfig]]
    keys: list[schema.Key]  # their variants are the engines with the key in this form
    unusable: Mapping[str, PluginUnusable]


@cache
def _find_engines(path: tuple[str, ...]) -> PackageEngines:
    """Import the engines of packages on a path, and return their keys."""
    del path
    sections = dict[str, type[PluginGeneratorConfig]]()
    unusable = dict[str, PluginUnusable]()
    for name in list_installed_names(_BACKEND):
        try:
            plugin = find_engine(name)
        except PluginUnusable as error:
            unusable[name] = error
            continue
        if plugin is not None:
            sections[name] = plugin.section
    by_form = dict[tuple[str, str, str], schema.Key]()
    for name, section in sections.items():
        for key in schema.list_keys(section, f"{_GENERATOR}."):
            form = (key.key, key.summary, key.doc)
            others = by_form[form].variants if form in by_form else ()
            by_form[form] = replace(key, variants=(*others, name))
    return PackageEngines(sections, list(by_form.values()), unusable)


def _explain_engine_key(key: str) -> str:
    """Explain a key of section ``generator`` that only engines of other packages have."""
    found = _find_engines(tuple(sys.path))
    forms = [each for each in found.keys if each.key == key]
    if not forms:
        place, _, _ = key.rpartition(".")
        below = [each for each in found.keys if each.key.rpartition(".")[0] == place]
        valid = {each.leaf for each in (*schema.children(place), *below)}
        hint = " ".join([meant(key, valid), *(f"{each}." for each in found.unusable.values())])
        raise NoSuchKey(key, hint)
    heads = [f"{key}: {_entry(each, _only_with_engines(each), '    ')}" for each in forms]
    below = [each for each in found.keys if each.key.startswith(f"{key}.")]
    entries = [_in_table(each, _only_with_engines(each)) for each in below]
    return "\n".join([*heads, *([""] if below else []), *entries])


def _only_with_engines(key: schema.Key) -> str:
    return f"\n    Only with {_BACKEND}={' or '.join(key.variants)}."


def _engines_of_packages() -> Iterator[str]:
    """Yield the description of each engine from another package, or why it cannot be loaded."""
    found = _find_engines(tuple(sys.path))
    yield from (f"    {name}: {schema.read_doc(each)}" for name, each in found.sections.items())
    yield from (f"    {name}: unusable. {each}." for name, each in found.unusable.items())


def _keys_of_packages() -> Iterator[str]:
    """Yield the keys of section ``generator`` that only engines of other packages have."""
    for key in _find_engines(tuple(sys.path)).keys:
        if schema.known(key.key) is None:
            yield _in_table(key, _only_with_engines(key))


def _engines_with(key: schema.Key) -> tuple[list[str], list[str]]:
    """Return other packages' engines with a key of section ``generator``, and notes on them."""
    installed = [*list_installed_names(_BACKEND)]
    if not installed:
        return [], []
    if key.key in {each.key for each in schema.list_keys(PluginGeneratorConfig, f"{_GENERATOR}.")}:
        return installed, [f"Another package may set another default: {', '.join(installed)}."]
    found = _find_engines(tuple(sys.path))
    forms = [each for each in found.keys if each.key == key.key]
    names = [name for each in forms for name in each.variants]
    notes = [
        f"With {_BACKEND}={' or '.join(each.variants)}: {each.summary}. {each.doc}"
        for each in forms
        if (each.summary, each.doc) != (key.summary, key.doc)
    ]
    return names, [*notes, *(f"{each}." for each in found.unusable.values())]
