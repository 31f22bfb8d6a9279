"""A recipe as written: every key and value with its source location.

Merges one recipe over another, and overrides over both.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from offbeat.config import schema
from offbeat.config.problems import Location
from offbeat.config.trainer_parts import keys_of_one_backend


@dataclass(frozen=True, slots=True)
class Leaf:
    """A scalar or a list."""

    value: Any
    text: str | None  # a scalar as written; None for null and lists
    location: Location

    def plain(self) -> Any:  # noqa: ANN401 - whatever a recipe can hold
        """Return the value."""
        return self.value


@dataclass(slots=True)
class Section:
    """A mapping. Keys are text, even if YAML would parse them differently."""

    children: dict[str, "Node"]
    location: Location

    def plain(self) -> dict[str, Any]:
        """Return only the values."""
        return {key: child.plain() for key, child in self.children.items()}

    def find(self, key: str) -> "Node | None":
        """Return the node at a dotted key."""
        node: Node | None = self
        for part in key.split("."):
            if not isinstance(node, Section):
                return None
            node = node.children.get(part)
        return node

    def text(self, key: str) -> str | None:
        """Return the scalar at a dotted key, as written, or None if it is null or missing."""
        node = self.find(key)
        return node.text if isinstance(node, Leaf) else None

    def parent(self, key: str) -> tuple["Section | None", str]:
        """Return the section that holds, or would hold, a dotted key, and the key's last part."""
        above, _, name = key.rpartition(".")
        node = self.find(above) if above else self
        return (node if isinstance(node, Section) else None), name

    def nearest_location(self, key: str) -> Location:
        """Return where the key is written, or the innermost section that encloses it."""
        node: Node = self
        for part in key.split("."):
            if not isinstance(node, Section) or part not in node.children:
                break
            node = node.children[part]
        return node.location

    def locations(self, prefix: str = "") -> Iterator[tuple[str, Location]]:
        """Yield dotted key and location of every leaf."""
        for name, child in self.children.items():
            key = f"{prefix}{name}"
            if isinstance(child, Section):
                yield from child.locations(f"{key}.")
            else:
                yield key, child.location


Node = Leaf | Section


def lay_over(base: Section, top: Section) -> list[str]:
    """Change ``base`` by ``top``: merge mappings key by key, replace everything else as a whole.

    If ``top`` chooses another variant (``sampler.name``, ``trainer.backend``), the keys of ``base``
    that the new variant lacks are dropped, except keys that the variant must refuse. The options of
    another environment are dropped too. If it names a different preset, all keys of the section in
    ``base`` are dropped.

    Returns:
        The dotted keys dropped, each with its location.
    """
    dropped = list[str]()
    _lay(base, top, "", dropped)
    return dropped


def join(base: Section, top: Section) -> None:
    """Change ``base`` by ``top``, which makes the same choices, so nothing is dropped."""
    for name, node in top.children.items():
        below = base.children.get(name)
        if isinstance(below, Section) and isinstance(node, Section):
            join(below, node)
        else:
            base.children[name] = node


def _lay(base: Section, top: Section, prefix: str, dropped: list[str]) -> None:
    section = prefix.removesuffix(".")
    for name in _left_behind(base, top, section):
        dropped.append(f"{section}.{name} ({base.children[name].location})")
        del base.children[name]
    for name, node in top.children.items():
        below = base.children.get(name)
        if isinstance(below, Section) and isinstance(node, Section):
            _lay(below, node, f"{prefix}{name}.", dropped)
            below.location = node.location
        else:
            base.children[name] = node


def _left_behind(base: Section, top: Section, section: str) -> list[str]:
    """Return the keys of ``base`` that belong to a choice that ``top`` changes."""
    if section == "environment" and (_changes(base, top, "name") or _changes(base, top, "target")):
        return ["options"] if "options" in base.children else []
    if section == "algorithm" and _changes(base, top, "preset"):
        # They would override the preset, because a resolved configuration has all keys.
        return [name for name in base.children if name != "preset"]
    known = schema.known(section)
    chooser = known.chosen_by if known is not None else ""
    chosen = top.text(chooser) or ""
    model = schema.find_choice(section, chosen)
    if model is None or not _changes(base, top, chooser):
        return []
    former = schema.find_choice(section, base.text(chooser) or "")
    # Without these keys a run would train other weights: only a stub drops them.
    stay = () if chosen == "stub" else keys_of_one_backend()
    of_former = set[str]() if former is None else former.model_fields.keys()
    return [
        name
        for name, node in base.children.items()
        if name not in model.model_fields
        # A misspelt key is reported
        and (schema.known(key := f"{section}.{name}") is not None or name in of_former)
        and (key not in stay or node.plain() is None)
    ]


def _changes(base: Section, top: Section, key: str) -> bool:
    return key in top.children and top.text(key) != base.text(key)
