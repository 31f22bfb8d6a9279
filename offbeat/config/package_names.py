"""Names that installed packages add to keys of a recipe.

They are in a package's metadata; the package is not imported.
"""

from collections.abc import Iterable, Mapping
from typing import Final, cast, get_args

from offbeat.config import schema
from offbeat.config.graders import GRADERS
from offbeat.config.problems import Problem
from offbeat.config.sections.algorithm import AdvantageName
from offbeat.config.tree import Leaf, Section
from offbeat.doors import (
    Kind,
    PluginUnusable,
    TargetKind,
    find_target,
    names_of_packages,
    suggest_package,
)

_TARGET_KINDS: Final[Mapping[str, TargetKind]] = {
    "algorithm.advantage": "advantage",
    "algorithm.loss.name": "loss",
    "sampler.name": "sampler",
    "environment.target": "grader",
}
"""Kind of the names that a key accepts instead of targets."""

_KINDS: Final[Mapping[str, Kind | TargetKind]] = {
    **_TARGET_KINDS,
    "environment.name": "environment",
    f"environments.{schema.NAME}.environment.name": "environment",
    "generator.backend": "engine",
    "plugins": "tracker",
}
"""Kind of the names that a key accepts, or that a section has as keys."""

_BUILT_IN: Final[Mapping[str, Iterable[str]]] = {
    "algorithm.advantage": get_args(AdvantageName),
    "environment.target": GRADERS,
}
"""Names of this package for a key that also holds targets."""


def list_installed_names(key: str) -> dict[str, str]:
    """Return the names that installed packages add to a key, each with its package."""
    kind, known = _KINDS.get(key), schema.known(key)
    if kind is None or known is None:
        return {}
    of_core = {*known.names, *_BUILT_IN.get(key, ())}
    return {name: of for name, of in names_of_packages(kind).items() if name not in of_core}


def suggest_name(key: str, value: object) -> str:
    """Return a fix for an unknown name, or "" if the key accepts more than names."""
    kind, known = _KINDS.get(key), schema.known(key)
    if kind is None or known is None or not known.names or not isinstance(value, str):
        return ""
    return suggest_package(kind, value)


def expand_names(layer: Section) -> list[Problem]:
    """Replace names by the target of a package's entry point.

    Return problems for names that several packages have.
    """
    problems = list[Problem]()
    for key, kind in _TARGET_KINDS.items():
        node, (section, last) = layer.find(key), layer.parent(key)
        if section is None or not isinstance(node, Leaf) or node.text is None:
            continue
        known = _BUILT_IN.get(key) or cast("schema.Key", schema.known(key)).names
        if node.text in known or ":" in node.text:
            continue
        try:
            target = find_target(kind, node.text)
        except PluginUnusable as unusable:
            fix = f"{unusable.fix}."
            problems.append(Problem(node.location, key, node.value, unusable.problem, fix))
            continue
        if target is not None:
            if key not in _BUILT_IN:
                section.children[last] = Leaf("custom", "custom", node.location)
                last = "target"
            section.children[last] = Leaf(target, target, node.location)
    return problems
