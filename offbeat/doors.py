"""Finds code by name: plug-ins, so that the core imports none of them, and user code and packages.

A plug-in of this package is a folder in ``offbeat/plugins``. Its ``plugin.py`` has one object for
each kind that it provides, such as ``TRACKER``. For a plug-in of another package, that package
declares an entry point ``KIND.NAME`` in the group ``offbeat.plugins``. Entry points are read only
if this package has no plug-in with the name. Code of another package is imported only when a recipe
or a command names it.

agents       plays groups of environments with episodes that call the model over HTTP:
             ``offbeat.rollouts.worker.AgentPlayer``
command      commands of ``offbeat``: a ``typer.Typer``
engine       samples from a model: ``offbeat.config.engine_plugin.EnginePlugin``
environment  turns prompts into rewarded samples:
             ``offbeat.environments.environment_plugin.EnvironmentPlugin``
media        pictures in prompts: arrays that a prompt carries next to its tokens
page         writes one page on runs: ``offbeat.launch.run.WritePage``
release      adds the tensors of a release to the weights that an engine loaded:
             ``offbeat.weight_sync.receiver.ReleaseKind``
release_form sends a release in a different form: ``offbeat.weight_sync.delta_plugin.DeltaPlugin``
runtime      executes a run: ``offbeat.launch.session.Runtime``
trainer      trains a model with a library other than torch:
             ``offbeat.trainers.trainer_plugin.TrainerPlugin``
trainer_part exchanges a part of a trainer:
             ``offbeat.trainers.trainer_plugin.TrainerPart``
tracker      receives the metrics of each step: ``offbeat.telemetry.tracker.Tracker``
transport    carries releases from trainer ranks to engines:
             ``offbeat.weight_sync.transport_plugin.TransportPlugin``
wire_format  quantizes the matrices of releases:
             ``offbeat.weight_sync.wire_format_plugin.WireFormat``

The kinds ``advantage``, ``grader``, ``loss`` and ``sampler`` are entry points only: shorter names for ``module:name``.
"""

import difflib
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from offbeat.messages.failures import FixableError
from offbeat.messages.media import NoMedia

Kind = Literal[
    "agents",
    "command",
    "division",
    "engine",
    "environment",
    "media",
    "page",
    "release",
    "release_form",
    "runtime",
    "tracker",
    "trainer",
    "trainer_part",
    "transport",
    "wire_format",
]

TargetKind = Literal["advantage", "grader", "loss", "sampler"]
"""Kinds that a recipe can also name by ``module:name``. An entry point is a shorter name."""

GROUP: Final = "offbeat.plugins"
"""Group of the entry points of other packages."""

_IN_TREE: Final[Mapping[Kind, Mapping[str, str]]] = {
    "agents": {"endpoint": "offbeat.plugins.agents.plugin:AGENTS"},
    "command": {
        "export": "offbeat.plugins.export.plugin:COMMANDS",
        "planning": "offbeat.plugins.planning.plugin:COMMANDS",
        "report": "offbeat.plugins.report.plugin:COMMANDS",
        "retrain": "offbeat.plugins.retrain.plugin:COMMANDS",
        "simulation": "offbeat.plugins.simulation.plugin:COMMANDS",
        "verify_weights": "offbeat.plugins.verify_weights.plugin:COMMANDS",
        "watch": "offbeat.plugins.watch.plugin:COMMANDS",
    },
    "division": {"tensor_ranks": "offbeat.plugins.tensor_ranks.plugin:PART"},
    "engine": {"vllm": "offbeat.plugins.vllm.plugin:ENGINE"},
    "environment": {
        "agent": "offbeat.plugins.agents.plugin:AGENT",
        "digits": "offbeat.plugins.images.plugin:DIGITS",
        "reasoning_gym": "offbeat.plugins.task_libraries.plugin:REASONING_GYM",
        "verifiers": "offbeat.plugins.task_libraries.plugin:VERIFIERS",
    },
    "media": {"images": "offbeat.plugins.images.plugin:MEDIA"},
    "page": {"report": "offbeat.plugins.report.plugin:PAGE"},
    "release": {"lora": "offbeat.plugins.lora.plugin:RELEASE"},
    "release_form": {"delta": "offbeat.plugins.delta.plugin:DELTA"},
    "runtime": {"local": "offbeat.local.run:LOCAL"},
    "tracker": {
        "wandb": "offbeat.plugins.wandb.plugin:TRACKER",
        "tensorboard": "offbeat.plugins.tensorboard.plugin:TRACKER",
    },
    "trainer": {"megatron": "offbeat.plugins.megatron.plugin:TRAINER"},
    "trainer_part": {
        "encoder_ranks": "offbeat.plugins.encoder_ranks.plugin:PART",
        "lora": "offbeat.plugins.lora.plugin:PART",
        "tensor_ranks": "offbeat.plugins.tensor_ranks.plugin:PART",
    },
    "transport": {"reshard": "offbeat.plugins.reshard.plugin:TRANSPORT"},
    "wire_format": {"fp8_block": "offbeat.plugins.float8.plugin:FORMAT"},
}
"""``module:name`` of each plug-in in this package."""


class _Interface(NamedTuple):
    """Facts about the object that an entry point of a kind must name."""

    types: tuple[str, ...]
    """``module:name`` of the accepted classes. The object is an instance of one."""

    attribute: str = ""
    """Attribute that is required in addition to the class's methods, or empty if none is."""

    attribute_type: str = ""
    """``module:name`` of the attribute's class."""

    holds_class: bool = False
    """Whether the attribute is a subclass of that class, not an instance."""


_INTERFACES: Final[Mapping[Kind, _Interface]] = {
    "command": _Interface(("typer:Typer",)),
    "engine": _Interface(
        ("offbeat.config.engine_plugin:EnginePlugin",),
        "section",
        "offbeat.config.sections.generator:PluginGeneratorConfig",
        holds_class=True,
    ),
    "environment": _Interface(
        (
            "offbeat.environments.environment_plugin:PluginOfEnvironments",
            "offbeat.environments.environment_plugin:PluginOfAgents",
        ),
        "traits",
        "offbeat.config.environment_traits:EnvironmentTraits",
    ),
    "tracker": _Interface(
        ("offbeat.telemetry.tracker:Tracker",),
        "section",
        "offbeat.config.base:Config",
        holds_class=True,
    ),
}
"""Interfaces of the kinds that other packages provide. Imported with such a plug-in."""


class PluginUnusable(FixableError):
    """A named plug-in cannot be used: it is missing, ambiguous or broken.

    Fix: install, repair or remove the named package (docs/doors.md).
    """


class NoSuchPlugin(PluginUnusable):
    """No package provides a plug-in with this name.

    Fix: use one of the named plug-ins, or install its package.
    """


def find_plugin(kind: Kind, name: str) -> Any:  # noqa: ANN401 -- each caller casts it to the type of its kind
    """Return the plug-in of this kind and name.

    Raises:
        NoSuchPlugin: No plug-in has the name.
        PluginUnusable: Several packages provide it, its import fails, or it does not fit its kind.
    """
    if name in _IN_TREE[kind]:
        found = _load(kind, name)
        if isinstance(found, PluginUnusable):
            raise found
        if found is not None:
            return found
    entries = _entry_points(f"{kind}.{name}")
    if not entries:
        raise _unknown(kind, name)
    entry = _only(entries, kind, name)
    found = _load_entry_point(entry)
    _check_interface(found, kind, entry)
    return found


def find_only(kind: Kind) -> Any:  # noqa: ANN401 -- as above
    """Return the only plug-in of a kind that has exactly one.

    Raises:
        PluginUnusable: As in ``find_plugin``.
    """
    (name,) = _IN_TREE[kind]
    return find_plugin(kind, name)


def names_of_packages(kind: Kind | TargetKind) -> dict[str, str]:
    """Return the names that other packages provide, with the packages. Import none of them.

    Names of this package's plug-ins are left out, because they hide equal names of other packages.
    """
    ours = _IN_TREE.get(kind, {})  # type: ignore[call-overload]  # empty of kinds with targets
    named = dict[str, list[str]]()
    for entry in _entry_points():
        of_kind, _, name = entry.name.partition(".")
        if of_kind == kind and name not in ours:
            named.setdefault(name, []).append(_package(entry))
    return {name: " and ".join(sorted(packages)) for name, packages in sorted(named.items())}


def suggest_package(kind: Kind | TargetKind, name: str) -> str:
    """Suggest a fix for an unknown name: a similar installed name, or a package to install."""
    brought = names_of_packages(kind)
    if near := difflib.get_close_matches(name, brought, n=1):
        return f"Did you mean `{near[0]}`?"
    installed = f" (installed: {', '.join(brought)})" if brought else ""
    return f"Or install the package with the entry point {kind}.{name} of {GROUP}{installed}."


def find_target(kind: TargetKind, name: str) -> str | None:
    """Return the ``module:name`` of an entry point of another package, without importing it.

    Raises:
        PluginUnusable: Several packages provide this entry point.
    """
    entries = _entry_points(f"{kind}.{name}")
    return None if not entries else _only(entries, kind, name).value


def find_media() -> Any:  # noqa: ANN401 -- ``environments.media_prompts`` types it
    """Return the plug-in for pictures in prompts, or ``NoMedia`` if its folder is missing.

    Raises:
        PluginUnusable: Its import fails.
    """
    (name,) = _IN_TREE["media"]
    return NoMedia() if _load("media", name) is None else find_plugin("media", name)


def explain_unusable(kind: Kind, name: str) -> str:
    """Return why a plug-in of this package cannot be used, or "" if it can or does not exist."""
    if name not in _IN_TREE[kind]:
        return ""
    found = _load(kind, name)
    if found is None:
        return f"This installation lacks the plug-in {name}: reinstall offbeat."
    return f"{found}." if isinstance(found, PluginUnusable) else ""


def find_plugins(kind: Kind) -> dict[str, Any]:
    """Return the plug-ins of this package by name, without absent and broken ones."""
    loaded = {name: _load(kind, name) for name in _IN_TREE[kind]}
    return {
        name: found
        for name, found in loaded.items()
        if found is not None and not isinstance(found, PluginUnusable)
    }


def is_in_package(kind: Kind, name: str) -> bool:
    """Return whether this package has a plug-in of this name, even if its folder is missing."""
    return name in _IN_TREE[kind]


def find_problems() -> list[PluginUnusable]:
    """Return problems: broken plug-ins of this package, and names repeated by other packages."""
    loaded = {(kind, name): _load(kind, name) for kind in _IN_TREE for name in _IN_TREE[kind]}
    broken = [found for found in loaded.values() if isinstance(found, PluginUnusable)]
    of_others = dict[str, list[str]]()
    for entry in _entry_points():
        of_others.setdefault(entry.name, []).append(_package(entry))
    ours = {f"{kind}.{name}" for (kind, name), found in loaded.items() if found is not None}
    for name, packages in of_others.items():
        claimants = sorted([*packages, "offbeat"] if name in ours else packages)
        if len(claimants) > 1:
            brought = f"{' and '.join(claimants)} each provide one"
            fix = "Uninstall all but one, or ask for another name"
            broken.append(PluginUnusable(name.replace(".", " "), brought, fix))
    return broken


def import_object(target: str) -> Any:  # noqa: ANN401 -- of any kind
    """Import ``module:name``, or a module if ``:name`` is missing. Errors are raised unchanged."""
    module_name, _, attribute = target.partition(":")
    module = import_module(module_name)
    return getattr(module, attribute) if attribute else module


def find_module(module: str, working_dir: Path) -> Path | None:
    """Return the file of ``module`` without importing any package around it."""
    top, *inner = module.split(".")
    spec = PathFinder.find_spec(top, [str(working_dir), *sys.path]) or _find_spec(top)
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # Only by its last name: for a dotted name the finder needs the imported package.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return Path(spec.origin or "built in") if spec is not None else None


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    return _find_spec(package) is not None


def find_installed_version(package: str) -> str | None:
    """Return the version in the metadata of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _load(kind: Kind, name: str) -> Any | None:  # noqa: ANN401 -- of any kind
    """Return a plug-in of this package, or why it is unusable, or None if its folder is missing."""
    target = _IN_TREE[kind][name]
    try:
        return import_object(target)
    except Exception as error:  # noqa: BLE001 -- a broken plug-in breaks nothing else
        is_missing = isinstance(error, ModuleNotFoundError)
        if is_missing and f"{target.partition(':')[0]}.".startswith(f"{error.name}."):
            return None
        fix = f"Install it: pip install 'offbeat[{name}]'" if is_missing else "Reinstall offbeat"
        return _broken(f"{kind} {name}", error, fix)


def _find_spec(package: str) -> ModuleSpec | None:
    """Find a package with all finders, because an editable install adds a finder."""
    try:
        return find_spec(package)
    except ValueError:  # loaded already, and without a spec: __main__
        return None


def _only(entries: Sequence[EntryPoint], kind: str, name: str) -> EntryPoint:
    if len(entries) > 1:
        packages = " and ".join(sorted(map(_package, entries)))
        problem = f"{packages} each provide one"
        raise PluginUnusable(f"{kind} {name}", problem, "Uninstall all but one")
    return entries[0]


def _load_entry_point(entry: EntryPoint) -> Any:  # noqa: ANN401 -- of any kind
    try:
        return entry.load()
    except Exception as error:
        fix = f"See the package {_package(entry)}"
        raise _broken(entry.name.replace(".", " "), error, fix) from error


def _check_interface(plugin: object, kind: Kind, entry: EntryPoint) -> None:
    """Check that a plug-in of another package fits its kind.

    Raises:
        PluginUnusable: The plug-in does not fit.
    """
    if kind in _INTERFACES and (wrong := _find_misfit(plugin, _INTERFACES[kind])):
        problem, fix = wrong
        problem = f"the entry point {entry.name} of the package {_package(entry)} names {problem}"
        raise PluginUnusable(f"{kind} {entry.name.partition('.')[2]}", problem, fix)


def _find_misfit(plugin: object, interface: _Interface) -> tuple[str, str] | None:
    """Return what form an object has that does not fit, and the fix. Return None if it fits."""
    types: list[type] = [import_object(each) for each in interface.types]
    names, class_name = " or ".join(each.__name__ for each in types), type(plugin).__name__
    by_type = [_find_missing(plugin, each, interface.attribute) for each in types]
    missing = ", ".join(min(by_type, key=len))
    lacks = f" that has no {missing}" if missing else ""
    if isinstance(plugin, type) and issubclass(plugin, tuple(types)):
        made = f"PLUGIN = {plugin.__name__}()"
        return f"the class {plugin.__name__}, not an object of it", f"Let it name an object: {made}"
    if not isinstance(plugin, tuple(types)):
        fix = f"Let it name an object of a class that derives from {names}"
        return f"{plugin!r:.80}, not of type {names}: an object of {class_name}{lacks}", fix
    if missing:
        return f"an object of {class_name}{lacks}", f"Give it {missing}"
    if not interface.attribute:
        return None
    value, wanted = getattr(plugin, interface.attribute), import_object(interface.attribute_type)
    if interface.holds_class:
        fits = isinstance(value, type) and issubclass(value, wanted)
    else:
        fits = isinstance(value, wanted)
    if fits:
        return None
    form = "a subclass" if interface.holds_class else "an object"
    problem = f"an object of {class_name} whose {interface.attribute} is {value!r:.80}"
    return problem, f"Set {interface.attribute} to {form} of {wanted.__name__}"


def _find_missing(plugin: object, needed: type, attribute: str) -> list[str]:
    methods: frozenset[str] = getattr(needed, "__abstractmethods__", frozenset())
    members = [attribute, *sorted(methods)] if attribute else sorted(methods)
    return [name for name in members if not hasattr(plugin, name)]


def _broken(subject: str, error: Exception, fix: str) -> PluginUnusable:
    return PluginUnusable(subject, f"its import fails with {type(error).__name__}: {error}", fix)


def _unknown(kind: Kind, name: str) -> NoSuchPlugin:
    known = ", ".join(find_plugins(kind))
    use = f"Use one of {known}, or install" if known else "Install"
    fix = f"{use} the package with the entry point {kind}.{name} of {GROUP}"
    return NoSuchPlugin(f"{kind} {name}", "there is no plug-in with this name", fix)


def _entry_points(name: str | None = None) -> list[EntryPoint]:
    return [each for each in _list_entry_points(tuple(sys.path)) if name in (None, each.name)]


@cache
def _list_entry_points(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of all packages on ``path``. Reading them takes some milliseconds."""
    del path
    return tuple(entry_points(group=GROUP))


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value
