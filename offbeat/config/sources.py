"""Reading recipes and overrides into trees; nothing here knows what the keys mean."""

import difflib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from offbeat.config import schema, yaml_text
from offbeat.config.hub_path import is_on_hub
from offbeat.config.merge import join
from offbeat.config.problems import ABSENT, Location, Problem, shorten
from offbeat.config.secrets import is_secret_key
from offbeat.config.tree import Leaf, Section
from offbeat.messages.text import list_names

MAX_CHAIN: Final = 16
_MOST_NEIGHBOURS: Final = 8
_OVERRIDE: Final = "override "


@dataclass(slots=True)
class Sources:
    """The layers of one configuration, the deepest first, and what was wrong while reading."""

    layers: list[Section] = field(default_factory=list[Section])
    files: list[Path] = field(default_factory=list[Path])  # the recipe asked for comes last
    problems: list[Problem] = field(default_factory=list[Problem])
    complete: bool = True  # False: a recipe could not be read, so what is missing may be in there


def read(recipe: Path, overrides: Sequence[str]) -> Sources:
    """Read ``recipe``, what it extends, and the overrides. Problems are collected, not raised."""
    sources = Sources()
    _read_chain(recipe, sources)
    _read_overrides(overrides, sources)
    return sources


def is_override(location: Location) -> bool:
    """Return whether a value came from the command line."""
    return location.source.startswith(_OVERRIDE)


# --- recipes -------------------------------------------------------------------------------------


def _read_chain(recipe: Path, sources: Sources) -> None:
    chain = list[tuple[Path, Section]]()
    visited = dict[Path, None]()
    link: _Link | None = _Link(recipe, Location(os.fspath(recipe)))
    while link is not None:
        problem = _unfollowable(link, visited)
        visited[link.path.resolve()] = None
        section = None if problem else _read_recipe(link, sources)
        if problem:
            sources.problems.append(problem)
        if section is None:
            sources.complete = False
            break
        chain.append((link.path, section))
        link = _next_link(link, section, sources)
    for path, section in reversed(chain):
        _make_paths_absolute(section, path.parent, sources.problems)
        sources.files.append(path)
        sources.layers.append(section)


@dataclass(frozen=True, slots=True)
class _Link:
    path: Path
    asked_at: Location  # the `extends` that names it; for the recipe itself, its path


def _unfollowable(link: _Link, visited: dict[Path, None]) -> Problem | None:
    identity = link.path.resolve()
    if identity in visited:
        names = " -> ".join(step.name for step in [*visited, identity])
        hint = "Take one `extends` out of the circle."
        return Problem(
            link.asked_at, "extends", ABSENT, f"the recipes extend each other: {names}", hint
        )
    if len(visited) >= MAX_CHAIN:
        message = f"more than {MAX_CHAIN} recipes extend one another"
        return Problem(link.asked_at, "extends", ABSENT, message, "Merge some of them.")
    return None


def _next_link(link: _Link, section: Section, sources: Sources) -> _Link | None:
    base = section.children.pop("extends", None)
    match base:
        case None:
            return None
        case Leaf(value=str(path)):
            whole = _from_home(base, "extends", sources.problems)
            return _Link(Path(os.path.normpath(link.path.parent / (whole or path))), base.location)
        case _:
            value = base.plain() if isinstance(base, Section) else base.value
            hint = "Write extends: base.yaml, relative to this file."
            message = "has to be the path of one recipe"
            sources.problems.append(Problem(base.location, "extends", value, message, hint))
            sources.complete = False
            return None


def _read_recipe(link: _Link, sources: Sources) -> Section | None:
    path = link.path
    try:
        with path.open("rb") as file:
            text = file.read(yaml_text.MAX_TEXT_BYTES + 1).decode("utf-8-sig")
        root, problems = yaml_text.parse(text, os.fspath(path))
    except OSError as error:
        sources.problems.append(_unreadable(link, error))
        return None
    except UnicodeDecodeError as error:
        where = Location(os.fspath(path))
        message = f"not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
        sources.problems.append(Problem(where, "", ABSENT, message, "Save the recipe as UTF-8."))
        return None
    except yaml_text.UnreadableYaml as error:
        sources.problems.append(error.problem)
        return None
    sources.problems.extend(problems)
    match root:
        case Section():
            return root
        case Leaf(value=None):
            return Section({}, Location(os.fspath(path)))
        case Leaf(value=value):
            message = "a recipe is a mapping of keys to values"
            hint = "Start with steps: 100 and model: {path: ...}; see recipes/ for examples."
            sources.problems.append(Problem(root.location, "recipe", value, message, hint))
            return None


def _unreadable(link: _Link, error: OSError) -> Problem:
    path, asked_at = link.path, link.asked_at
    message = f"recipe {path} cannot be read: {error.strerror}"
    if asked_at.line is not None:
        return Problem(asked_at, "extends", os.fspath(path), message, _neighbours(path))
    return Problem(asked_at, "", ABSENT, message, _neighbours(path))


def _neighbours(path: Path) -> str:
    """Recipes a user may have meant: beside the path, and in ``recipes/``."""
    folders = dict.fromkeys([path.parent, Path("recipes")])
    found = [
        os.fspath(file)
        for folder in folders
        if folder.is_dir()
        for file in sorted(folder.iterdir())
        if file.suffix in (".yaml", ".yml") and file.is_file()
    ]
    if not found:
        looked = " or ".join(f"{folder}/" for folder in folders)
        return f"There are no recipes in {looked}. offbeat init writes one that trains."
    by_name = {Path(name).stem: name for name in reversed(found)}
    near = difflib.get_close_matches(path.stem, by_name, n=1)
    listing = f"Recipes nearby: {list_names(found, _MOST_NEIGHBOURS)}."
    return f"Did you mean {by_name[near[0]]}? {listing}" if near else listing


def _make_paths_absolute(layer: Section, folder: Path, problems: list[Problem]) -> None:
    """Paths are relative to the file that names them, so they are resolved before layers mix."""
    paths = [key.key for key in schema.known_keys().values() if key.is_path]
    for key in (place for path in paths for place in _places(layer, path)):
        section, name = layer.parent(key)
        leaf = section.children.get(name) if section else None
        if section and isinstance(leaf, Leaf) and leaf.text and not is_on_hub(leaf.text):
            whole = os.path.normpath(folder.absolute() / _from_home(leaf, key, problems))
            section.children[name] = Leaf(whole, whole, leaf.location)
    run_dir = layer.children.get("run_dir")
    if isinstance(run_dir, Leaf) and run_dir.text:
        path = _from_home(run_dir, "run_dir", problems)
        layer.children["run_dir"] = Leaf(path, path, run_dir.location)


def _from_home(leaf: Leaf, key: str, problems: list[Problem]) -> str:
    """Return the path of a leaf with the home directory that ``~`` or ``~user`` stands for."""
    path = leaf.text or ""
    if not path.startswith("~"):
        return path
    try:
        return os.fspath(Path(path).expanduser())
    except RuntimeError:  # of pathlib
        hint = (
            "Write ~/ for your own home, ./~NAME for a directory of that name, or the whole path."
        )
        problems.append(Problem(leaf.location, key, path, "there is no such home directory", hint))
        return path


def _places(layer: Section, key: str) -> Iterator[str]:
    """Yield where a key stands in a layer: itself, or below each of the names that it chooses."""
    above, named, below = key.partition(f".{schema.NAME}.")
    if not named:
        yield key
    elif isinstance(sections := layer.find(above), Section):
        yield from (f"{above}.{name}.{below}" for name in sections.children)


# --- overrides -----------------------------------------------------------------------------------


def _read_overrides(overrides: Sequence[str], sources: Sources) -> None:
    """Read all overrides as one layer, so that their order matters only for a key given twice."""
    sections = [found for each in overrides if (found := _read_override(each, sources))]
    if sections:
        layer, *others = sections
        for other in others:
            join(layer, other)
        sources.layers.append(layer)


def _quoted_for_yaml(key: str, text: str) -> str:
    """Return the advice for a value that YAML cannot read; of a list, the elements need the quotes."""
    if not text.startswith("["):
        return f"Quote the value for YAML too: {key}='\"...\"'."
    inside = text.removeprefix("[").removesuffix("]")
    if set(inside) & set("\"'{}") or is_secret_key(key):
        return f"Quote each element for YAML too: '{key}=[\"...\"]'."
    elements = ", ".join(f'"{each.strip()}"' for each in inside.split(","))
    return f"Quote each element for YAML too: '{key}=[{elements}]'."


def _read_override(override: str, sources: Sources) -> Section | None:
    """``a.b.c=value``. A path in it is relative to the working directory."""
    key, equals, text = override.partition("=")
    shown = f"{key}=..." if is_secret_key(key) else override
    where = Location(f"{_OVERRIDE}{shorten(shown)}")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        message = "this is no override"
        hint = "Write key=value with a dotted key, as in sampler.max_staleness=2."
        sources.problems.append(Problem(where, "", ABSENT, message, hint))
        return None
    try:
        node, problems = yaml_text.parse(text, where.source, numbered=False)
    except yaml_text.UnreadableYaml as error:
        problem = error.problem
        hint = _quoted_for_yaml(key, text)
        sources.problems.append(Problem(where, key, text, problem.message, hint))
        return None
    sources.problems.extend(problems)
    section = Section({parts[-1]: node}, where)
    for part in reversed(parts[:-1]):
        section = Section({part: section}, where)
    _make_paths_absolute(section, Path.cwd(), sources.problems)
    return section
