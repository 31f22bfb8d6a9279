"""A recipe as it was written: every key and value with the place it came from."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from offbeat.config.problems import Location


@dataclass(frozen=True, slots=True)
class Leaf:
    """A scalar or a list."""

    value: Any
    text: str | None  # as written, of a scalar that is not null
    location: Location

    def plain(self) -> Any:  # noqa: ANN401 - whatever a recipe can hold
        """Return the value."""
        return self.value


@dataclass(slots=True)
class Section:
    """A mapping. Keys are text, whatever YAML would make of them."""

    children: dict[str, "Node"]
    location: Location

    def plain(self) -> dict[str, Any]:
        """The values alone."""
        return {key: child.plain() for key, child in self.children.items()}

    def find(self, key: str) -> "Node | None":
        """The node at a dotted key."""
        node: Node | None = self
        for part in key.split("."):
            if not isinstance(node, Section):
                return None
            node = node.children.get(part)
        return node

    def text(self, key: str) -> str | None:
        """The scalar at a dotted key, as written; None if it is null, or no scalar is there."""
        node = self.find(key)
        return node.text if isinstance(node, Leaf) else None

    def parent(self, key: str) -> tuple["Section | None", str]:
        """The section that holds, or would hold, a dotted key; and the last part of the key."""
        above, _, name = key.rpartition(".")
        node = self.find(above) if above else self
        return (node if isinstance(node, Section) else None), name

    def nearest_location(self, key: str) -> Location:
        """Return where the key is written, else the innermost section around it."""
        node: Node = self
        for part in key.split("."):
            if not isinstance(node, Section) or part not in node.children:
                break
            node = node.children[part]
        return node.location

    def locations(self, prefix: str = "") -> Iterator[tuple[str, Location]]:
        """Dotted key and location of every leaf."""
        for name, child in self.children.items():
            key = f"{prefix}{name}"
            if isinstance(child, Section):
                yield from child.locations(f"{key}.")
            else:
                yield key, child.location


Node = Leaf | Section
