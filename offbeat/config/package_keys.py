"""Names and keys of a recipe that installed packages of others bring, for ``offbeat config explain``.

Names are in the metadata of a package, which is not imported; the keys of an engine are in its code.
"""

import sys
from collections.abc import Mapping
from functools import cache
from typing import Final, NamedTuple

from offbeat.config import schema
from offbeat.config.engine_plugin import find_engine
from offbeat.config.normalise import BUILT_IN, TARGET_KINDS
from offbeat.config.sections.generator import PluginGeneratorConfig
from offbeat.doors import Kind, PluginUnusable, TargetKind, names_of_packages

GENERATOR: Final = "generator"
"""The section that an engine brings."""

BACKEND: Final = f"{GENERATOR}.backend"
"""The key that names an engine."""

_KINDS: Final[Mapping[str, Kind | TargetKind]] = {
    **TARGET_KINDS,
    "environment.name": "environment",
    f"environments.{schema.NAME}.environment.name": "environment",
    BACKEND: "engine",
    "plugins": "tracker",
}
"""Kind of the names that a key takes, or that a section has as keys."""


class EngineKey(NamedTuple):
    """A key, and the engines of packages that have it in this form."""

    key: schema.Key
    engines: list[str]


class PackageEngines(NamedTuple):
    """Engines that installed packages bring, imported."""

    sections: Mapping[str, type[PluginGeneratorConfig]]
    keys: list[EngineKey]
    unusable: Mapping[str, PluginUnusable]


def installed_names(key: str) -> dict[str, str]:
    """Return the names that installed packages bring for a key, each with its package."""
    kind, known = _KINDS.get(key), schema.known(key)
    if kind is None or known is None:
        return {}
    of_core = {*known.names, *BUILT_IN.get(kind, ())}  # type: ignore[call-overload]
    return {name: of for name, of in names_of_packages(kind).items() if name not in of_core}


def is_of_every_engine(key: str) -> bool:
    """Return whether the section of any package's engine has a key, by its base class."""
    return key in {each.key for each in keys_of_engine(PluginGeneratorConfig)}


def find_engines() -> PackageEngines:
    """Import the engines that packages bring, and return their keys."""
    return _find_engines(tuple(sys.path))


def keys_of_engine(section: type[PluginGeneratorConfig]) -> list[schema.Key]:
    """Return the keys of the section of an engine."""
    return schema.keys_of(section, f"{GENERATOR}.")


@cache
def _find_engines(path: tuple[str, ...]) -> PackageEngines:
    del path
    sections = dict[str, type[PluginGeneratorConfig]]()
    unusable = dict[str, PluginUnusable]()
    for name in installed_names(BACKEND):
        try:
            plugin = find_engine(name)
        except PluginUnusable as error:
            unusable[name] = error
            continue
        if plugin is not None:
            sections[name] = plugin.section
    by_form = dict[tuple[str, str, str], EngineKey]()
    for name, section in sections.items():
        for key in keys_of_engine(section):
            form = (key.key, key.summary, key.doc)
            by_form.setdefault(form, EngineKey(key, [])).engines.append(name)
    return PackageEngines(sections, list(by_form.values()), unusable)
