"""Reads recipes and overrides into trees, without knowing the meaning of keys."""

import difflib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

from offbeat.config import schema, yaml_text
from offbeat.config.hub_path import HUB, hub_model, is_on_hub
from offbeat.config.problems import ABSENT, ConfigError, Location, Problem, shorten
from offbeat.config.secrets import is_secret_key
from offbeat.config.tree import Leaf, Section, join
from offbeat.messages.text import list_names

MAX_CHAIN: Final = 16
_MOST_NEIGHBOURS: Final = 8
_MODEL: Final = "model.path"
_OVERRIDE: Final = "override "


@dataclass(slots=True)
class Sources:
    """The layers of one configuration, base first, and the problems found while reading."""

    layers: list[Section] = field(default_factory=list[Section])
    files: list[Path] = field(default_factory=list[Path])  # the requested recipe is the last
    problems: list[Problem] = field(default_factory=list[Problem])
    complete: bool = True  # False: an unreadable recipe may contain missing keys


def read(recipe: Path | None, overrides: Sequence[str]) -> Sources:
    """Read ``recipe`` if given, the recipes that it extends, and the overrides.

    Problems are collected, not raised.
    """
    sources = Sources()
    if recipe is not None:
        _read_chain(recipe, sources)
    _read_overrides(overrides, sources)
    return sources


def is_override(location: Location) -> bool:
    """Return whether a value came from the command line."""
    return location.source.startswith(_OVERRIDE)


def overridden_key(location: Location) -> str:
    """Return the key that the override at a location sets; the text after the key may be cut."""
    return location.source.removeprefix(_OVERRIDE)[1:].partition("=")[0]


# --- recipes -------------------------------------------------------------------------------------


def _read_chain(recipe: Path, sources: Sources) -> None:
    chain = dict[Path, Section]()
    path, asked_at = recipe, Location(os.fspath(recipe))
    try:
        while path is not None:
            _check_link(path, asked_at, chain)
            chain[path] = section = _read_recipe(path, asked_at, sources.problems)
            path, asked_at = _pop_base(path, section, sources.problems)
    except ConfigError as error:
        sources.problems.extend(error.problems)
        sources.complete = False
    for path, section in reversed(chain.items()):
        _make_paths_absolute(section, path.parent, sources.problems)
        sources.files.append(path)
        sources.layers.append(section)


def _refusal(where: Location, key: str, value: object, message: str, hint: str) -> ConfigError:
    """Return the error of a recipe that cannot be read or followed."""
    return ConfigError((Problem(where, key, value, message, hint),))


def _check_link(path: Path, asked_at: Location, above: Iterable[Path]) -> None:
    """Raise ConfigError if ``path`` extends itself through ``above``, or the chain is too long."""
    visited = [each.resolve() for each in above]
    if (identity := path.resolve()) in visited:
        names = " -> ".join(step.name for step in [*visited, identity])
        message = f"the recipes extend each other: {names}"
        hint = "Remove one `extends` from the circle."
        raise _refusal(asked_at, "extends", ABSENT, message, hint)
    if len(visited) >= MAX_CHAIN:
        message = f"more than {MAX_CHAIN} recipes extend one another"
        raise _refusal(asked_at, "extends", ABSENT, message, "Merge some of them.")


def _pop_base(
    path: Path, section: Section, problems: list[Problem]
) -> tuple[Path | None, Location]:
    """Remove ``extends`` from a recipe; return the path in it, if any, and its location."""
    match section.children.pop("extends", None):
        case None:
            return None, section.location
        case Leaf(value=str(base)) as leaf:
            whole = _from_home(leaf, "extends", problems)
            return Path(os.path.normpath(path.parent / (whole or base))), leaf.location
        case node:
            hint = "Write extends: base.yaml, relative to this file."
            message = "has to be the path of one recipe"
            raise _refusal(node.location, "extends", node.plain(), message, hint)


_SHELL: Final = frozenset({".sh", ".bash"})
_OF_A_SCRIPT: Final = (
    "To translate the settings of a script, pass them as arguments after a recipe: offbeat check "
    "recipe.yaml data.train_batch_size=64 ..."
)


def _read_recipe(path: Path, asked_at: Location, problems: list[Problem]) -> Section:
    where = Location(os.fspath(path))
    try:
        with path.open("rb") as file:
            text = file.read(yaml_text.MAX_TEXT_BYTES + 1).decode("utf-8-sig")
    except OSError as error:
        message = f"recipe {path} cannot be read: {error.strerror}"
        key, value = ("", ABSENT) if asked_at.line is None else ("extends", os.fspath(path))
        raise _refusal(asked_at, key, value, message, _neighbours(path)) from error
    except UnicodeDecodeError as error:
        message = f"not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
        raise _refusal(where, "", ABSENT, message, "Save the recipe as UTF-8.") from error
    if path.suffix in _SHELL or text.startswith("#!"):
        raise _refusal(where, "", ABSENT, "a shell script is no recipe", _OF_A_SCRIPT)
    root, found = yaml_text.parse(text, os.fspath(path))
    problems.extend(found)
    if isinstance(root, Section):
        return root
    if root.value is None:
        return Section({}, where)
    message = "a recipe is a mapping of keys to values"
    hint = "Start with steps: 100 and model: {path: ...}; see recipes/ for examples."
    raise _refusal(root.location, "recipe", root.value, message, hint)


def _neighbours(path: Path) -> str:
    """Return recipes that a user may have meant: next to the path, and in ``recipes/``."""
    folders = dict.fromkeys([path.parent, Path("recipes")])
    found = [
        os.fspath(file)
        for folder in folders
        if folder.is_dir()
        for file in sorted(folder.iterdir())
        if file.suffix in (".yaml", ".yml") and file.name[0] != "." and file.is_file()
    ]
    if not found:
        looked = " or ".join(f"{folder}/" for folder in folders)
        return f"There are no recipes in {looked}. offbeat init writes one that trains."
    by_name = {Path(name).stem: name for name in reversed(found)}
    near = difflib.get_close_matches(path.stem, by_name, n=1)
    listing = f"Recipes nearby: {list_names(found, _MOST_NEIGHBOURS)}."
    return f"Did you mean {by_name[near[0]]}? {listing}" if near else listing


def _make_paths_absolute(layer: Section, folder: Path, problems: list[Problem]) -> None:
    """Resolve paths relative to the file that contains them, before layers are merged."""
    paths = [key.key for key in schema.known_keys().values() if key.is_path]
    for key in (place for path in paths for place in _places(layer, path)):
        section, name = layer.parent(key)
        leaf = section.children.get(name) if section else None
        if section and isinstance(leaf, Leaf) and leaf.text and not is_on_hub(leaf.text):
            whole = os.path.normpath(folder.absolute() / _from_home(leaf, key, problems))
            if key == _MODEL and hub_model(leaf.text) is not None and not Path(whole).exists():
                whole = f"{HUB}{leaf.text}"
            section.children[name] = Leaf(whole, whole, leaf.location)
    run_dir = layer.children.get("run_dir")
    if isinstance(run_dir, Leaf) and run_dir.text:
        path = _from_home(run_dir, "run_dir", problems)
        layer.children["run_dir"] = Leaf(path, path, run_dir.location)


def _from_home(leaf: Leaf, key: str, problems: list[Problem]) -> str:
    """Return the path of a leaf with ``~`` or ``~user`` replaced by the home directory."""
    path = leaf.text or ""
    if not path.startswith("~"):
        return path
    try:
        return os.fspath(Path(path).expanduser())
    except RuntimeError:  # raised by pathlib
        hint = (
            "Write ~/ for your own home, ./~NAME for a directory of that name, or the whole path."
        )
        problems.append(Problem(leaf.location, key, path, "there is no such home directory", hint))
        return path


def _places(layer: Section, key: str) -> Iterator[str]:
    """Yield the places of a key in a layer: itself, or below each name that the layer chooses."""
    above, named, below = key.partition(f".{schema.NAME}.")
    if not named:
        yield key
    elif isinstance(sections := layer.find(above), Section):
        yield from (f"{above}.{name}.{below}" for name in sections.children)


# --- overrides -----------------------------------------------------------------------------------


def _read_overrides(overrides: Sequence[str], sources: Sources) -> None:
    """Read all overrides as one layer. Their order matters only for a key that is set twice."""
    layer = Section({}, Location(_OVERRIDE))
    for each in overrides:
        if (section := _read_override(each, sources)) is not None:
            join(layer, section)
    sources.layers.append(layer)


def _advise_quotes(key: str, text: str) -> str:
    """Return advice for a value that YAML cannot read. In a list, the elements need quotes."""
    if not text.startswith("["):
        return f"Quote the value for YAML too: {key}='\"...\"'."
    inside = text.removeprefix("[").removesuffix("]")
    if set(inside) & set("\"'{}") or is_secret_key(key):
        return f"Quote each element for YAML too: '{key}=[\"...\"]'."
    elements = ", ".join(f'"{each.strip()}"' for each in inside.split(","))
    return f"Quote each element for YAML too: '{key}=[{elements}]'."


def _read_override(override: str, sources: Sources) -> Section | None:
    """Read ``a.b.c=value``. A path in it is relative to the working directory."""
    key, equals, text = override.partition("=")
    shown = f"{key}=..." if is_secret_key(key) else override
    where = Location(f"{_OVERRIDE}{shorten(shown)}")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        message = "this is not an override"
        hint = "Write key=value with a dotted key, as in sampler.max_staleness=2."
        sources.problems.append(Problem(where, "", ABSENT, message, hint))
        return None
    try:
        node, problems = yaml_text.parse(text, where.source, numbered=False)
    except ConfigError as error:
        message, hint = error.problems[0].message, _advise_quotes(key, text)
        sources.problems.append(Problem(where, key, text, message, hint))
        return None
    sources.problems.extend(problems)
    for part in reversed(parts):
        node = Section({part: node}, where)
    section = cast("Section", node)
    _make_paths_absolute(section, Path.cwd(), sources.problems)
    return section
