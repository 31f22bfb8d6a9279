"""Reads a recipe and overrides into one checked configuration, or one report of all problems."""

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from offbeat.config import schema, sources
from offbeat.config.crosschecks import Clash, clashes
from offbeat.config.normalise import expand_short_forms, normalise, value_hint
from offbeat.config.package_names import suggest_name
from offbeat.config.problems import ABSENT, ConfigError, Location, Problem
from offbeat.config.run import RunConfig
from offbeat.config.sections.environment import PLUGIN_UNUSABLE
from offbeat.config.tree import Leaf, Section, lay_over
from offbeat.doors import Kind, explain_unusable

_NO_RECIPE: Final = "arguments"
_REMOVED: Final = {
    "sync.transport=gloo": "The gloo broadcast was removed. Set sync.transport to reshard, which also "
    "sends over TCP, or to object_store.",
}
"""Replacements for values of older recipes and runs, by key and value."""
_PLUGINS: Final[Mapping[str, Kind]] = {
    "environment.name": "environment",
    f"environments.{schema.NAME}.environment.name": "environment",
    "sync.quantize": "wire_format",
    "sync.transport": "transport",
}
"""Kind of plug-in that a key selects."""


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A working configuration and its sources. Its paths are absolute."""

    config: RunConfig
    recipe: Path | None  # as asked for; None if there are only overrides
    sources: tuple[Path, ...]  # recipes in reading order; an extended recipe precedes its extension
    origins: Mapping[str, Location]  # of every key that was set; other keys have their defaults
    dropped: tuple[str, ...]  # inherited keys dropped because a name selects another choice


def load_recipe(
    path: Path | str | None, overrides: Sequence[str] = (), *, dry_run: bool = False
) -> LoadedRecipe:
    """Read, merge and check everything. Only the home directory is read from the environment.

    ``model.path: OWNER/NAME`` is a hub model unless such a directory exists.

    A recipe may name a base recipe in ``extends:``, and overrides its values. ``overrides`` are
    dotted ``a.b.c=value`` with a YAML value; the last one wins. Relative paths are relative to the
    file that contains them or, in an override, to the working directory. ``~`` is the home
    directory.

    Args:
        path: A YAML file, or None to use only the overrides.
        overrides: Settings that override the recipe.
        dry_run: Whether stubs replace backends and devices, which then need not exist.

    Raises:
        ConfigError: With every problem found. There is no partly usable result.
    """
    recipe = None if path is None else Path(path)
    read = sources.read(recipe, overrides)
    if recipe is not None and not read.files:
        raise ConfigError(tuple(read.problems))
    root = Section({}, Location(_NO_RECIPE if recipe is None else os.fspath(recipe)))
    ambiguous = [problem for layer in read.layers for problem in expand_short_forms(layer)]
    dropped = [key for layer in read.layers for key in lay_over(root, layer)]
    problems = [*read.problems, *ambiguous, *normalise(root)]
    config, wrong = _judge(root)
    problems += _news(wrong, problems, complete=read.complete)
    bad = {problem.key for problem in problems if problem.key}
    problems += _cross_check(config or _patch(root, bad), root, bad, dry_run=dry_run)
    if problems or config is None:
        raise ConfigError(tuple(sorted(problems, key=_reading_order)))
    return LoadedRecipe(
        config,
        recipe,
        tuple(read.files),
        dict(root.locations()),
        tuple(dropped),
    )


def resolve_run_dir(config: RunConfig) -> Path:
    """Return the absolute run directory, with ``{name}`` filled in.

    A relative path in the recipe is resolved against the working directory.
    """
    return Path(config.run_dir.replace("{name}", config.name)).absolute()


def _reading_order(problem: Problem) -> tuple[bool, str, int]:
    where = problem.location
    return sources.is_override(where), where.source, where.line or 0


# --- one value at a time -------------------------------------------------------------------------


def _judge(root: Section) -> tuple[RunConfig | None, list[Problem]]:
    try:
        return RunConfig.model_validate(root.plain()), []
    except ValidationError as error:
        by_key = {_find_key(detail): detail for detail in reversed(error.errors(include_url=False))}
        return None, [_problem(key, detail, root) for key, detail in by_key.items()]


def _news(wrong: list[Problem], known: list[Problem], *, complete: bool) -> Iterator[Problem]:
    """Yield problems that do not follow from a known problem.

    A known problem can be a removed value or a missing recipe.
    """
    keys = {problem.key for problem in known}
    values = {(problem.key, problem.location) for problem in known}
    for problem in wrong:
        follows = (
            problem.key in keys or not complete
            if problem.value is ABSENT
            else (problem.key, problem.location) in values
        )
        if not follows:
            yield problem


def _find_key(detail: ErrorDetails) -> str:
    """Return the dotted key of a pydantic error, without choices and list indices."""
    key, chosen = "", ""
    for part in detail["loc"]:
        if key != chosen and part in schema.choices(key):
            chosen = key  # pydantic names the choice after its section, as in ("trainer", "torch", "device")
            continue
        longer = f"{key}.{part}" if key else str(part)
        if schema.known(longer) is None:
            break
        key = longer
    return schema.chooser(key) or key


def _problem(key: str, detail: ErrorDetails, root: Section) -> Problem:
    known, where = cast("schema.Key", schema.known(key)), root.nearest_location(key)
    if detail["type"] == "missing":
        message = f"required and missing: {known.kind}"
        return Problem(where, key, ABSENT, message, f"{known.doc} Add it, or pass {key}=...")
    node = root.find(key)
    value = node.plain() if node else detail["input"]
    if detail["type"] == PLUGIN_UNUSABLE:
        return Problem(where, key, value, detail["msg"], detail.get("ctx", {}).get("fix", ""))
    near = difflib.get_close_matches(str(value), known.names, n=1)
    suggestion = _REMOVED.get(f"{key}={value}", f"Did you mean `{near[0]}`?" if near else "")
    if known.key in _PLUGINS:
        suggestion = explain_unusable(_PLUGINS[known.key], str(value)) or suggestion
    hint = value_hint(known, suggestion or suggest_name(key, value))
    return Problem(where, key, value, f"has to be: {known.kind}", hint)


# --- several values together ---------------------------------------------------------------------


def _patch(root: Section, bad: set[str]) -> RunConfig | None:
    """Return the configuration with each bad value replaced by its default.

    Return None if it still does not validate.
    """
    for key in bad:
        # The choice decides which keys a section has, so a bad choice removes the whole section.
        above = key.rpartition(".")[0]
        section, name = root.parent(above if schema.chooser(above) == key else key)
        if section is not None:
            section.children.pop(name, None)
    given = root.plain()
    values = {"steps": 1, **given, "model": {"path": ".", **given.get("model", {})}}  # required
    try:
        return RunConfig.model_validate(values)
    except ValidationError:
        return None


def _cross_check(
    config: RunConfig | None, root: Section, bad: set[str], *, dry_run: bool
) -> Iterator[Problem]:
    """Yield problems for combinations of values that are valid separately."""
    for clash in clashes(config, dry_run=dry_run) if config is not None else ():
        if not any(_concerns(key, wrong) for key in clash.keys for wrong in bad):
            node = root.find(clash.keys[0])
            value = node.value if isinstance(node, Leaf) else ABSENT
            yield Problem(_locate(clash, root), clash.keys[0], value, clash.message, clash.hint)


def _concerns(key: str, wrong: str) -> bool:
    section = wrong.rpartition(".")[0]
    return f"{key}.".startswith(f"{wrong}.") or (
        schema.chooser(section) == wrong and key.startswith(f"{section}.")
    )


def _locate(clash: Clash, root: Section) -> Location:
    """Return the location to change: an override in the clash, else the first key that was set."""
    given = [node.location for key in clash.keys if (node := root.find(key)) is not None]
    typed = [location for location in given if sources.is_override(location)]
    return next(iter([*typed, *given]), root.location)
