# pyright: basic
# PyYAML comes without types.
"""YAML text to a tree and back, within bounds, so that a hostile or broken file costs little.

Only plain data: a tag that would build a Python object is a problem. ``3e-4`` is a number, as in
YAML 1.2 and JSON; a key given twice is a problem; keys are text.
"""

import re
from typing import Any, Final

import yaml
from yaml import events, nodes

from offbeat.config.problems import ABSENT, Location, Problem
from offbeat.config.tree import Leaf, Node, Section

MAX_TEXT_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 32
MAX_NODES: Final = 20_000  # aliases are counted each time they are used

_FLOAT: Final = "tag:yaml.org,2002:float"
_COLLECTIONS: Final = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_EXPONENT: Final = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")


class _RecipeLoader(yaml.SafeLoader):
    """Plain data, and ``3e-4`` is a number."""


class RecipeDumper(yaml.SafeDumper):
    """Writes what the loader reads back as the same value: the text ``3e-4`` gets quotes."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 -- the base class's parameter
        """Write equal values out each time: readers of a run directory refuse aliases."""
        return True

    def represent_scalar(self, tag: str, value: str, style: str | None = None) -> nodes.ScalarNode:
        # Between single quotes, YAML folds characters it takes for line ends: U+0085, U+2028.
        escaped = style is None and not value.isprintable()
        return super().represent_scalar(tag, value, '"' if escaped else style)


for _yaml_class in (_RecipeLoader, RecipeDumper):
    _yaml_class.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+.0123456789"))


class UnreadableYaml(Exception):
    """The text cannot be read at all. Never leaves this package: the loader reports it."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem


def parse(text: str, source: str, *, numbered: bool = True) -> tuple[Node, list[Problem]]:
    """The tree of one YAML document, and what is wrong with it short of being unreadable.

    Args:
        text: The document. An empty one is a null leaf.
        source: What a location names: a path, or the override.
        numbered: Whether a line number helps; an override has none.

    Raises:
        UnreadableYaml: For a syntax error, a second document, or a document beyond the bounds.
    """
    reader = _Reader(source, numbered=numbered)
    try:
        _check_bounds(text, reader)
        root = yaml.compose(text, Loader=_RecipeLoader)
    except yaml.MarkedYAMLError as error:
        where = reader.location(error.problem_mark or error.context_mark)
        raise UnreadableYaml(
            Problem(where, "", ABSENT, f"not valid YAML: {_words(error)}", _SYNTAX_HINT)
        ) from error
    except yaml.YAMLError as error:  # a character YAML does not allow
        what = " ".join(str(error).split())
        problem = Problem(Location(source), "", ABSENT, f"not valid YAML: {what}", "")
        raise UnreadableYaml(problem) from error
    if root is None:
        return Leaf(None, None, Location(source)), []
    return reader.node(root, ""), reader.problems


_SYNTAX_HINT: Final = "Check indentation (spaces, no tabs), the space after a colon, and quotes."


def _words(error: yaml.MarkedYAMLError) -> str:
    parts = (error.problem, error.context)
    return ", ".join(" ".join(part.split()) for part in parts if part)


def _check_bounds(text: str, reader: "_Reader") -> None:
    """Refuse a document before anything recurses into it."""
    if (size := len(text.encode(errors="surrogatepass"))) > MAX_TEXT_BYTES:
        raise reader.too_much(f"{size} bytes long; at most {MAX_TEXT_BYTES} are read")
    depth = 0
    for event in yaml.parse(text, Loader=_RecipeLoader):
        if isinstance(event, events.CollectionStartEvent):
            depth += 1
        elif isinstance(event, events.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise reader.too_much(f"nested deeper than {MAX_DEPTH} levels", event.start_mark)


class _Reader:
    """Turns YAML nodes into a tree, collecting problems and keeping count."""

    def __init__(self, source: str, *, numbered: bool) -> None:
        self._source, self._numbered = source, numbered
        self._scalars = _RecipeLoader("")
        self._count = 0
        self.problems = list[Problem]()

    def location(self, mark: Any) -> Location:  # noqa: ANN401 - yaml has no types
        if mark is None or not self._numbered:
            return Location(self._source)
        return Location(self._source, mark.line + 1, mark.column + 1)

    def too_much(self, what: str, mark: Any = None) -> UnreadableYaml:  # noqa: ANN401
        hint = "A recipe is a short text; keep data in a file of its own."
        return UnreadableYaml(Problem(self.location(mark), "", ABSENT, f"this is {what}", hint))

    def node(self, node: nodes.Node, key: str, depth: int = 0) -> Node:
        self._count += 1
        if self._count > MAX_NODES or depth > MAX_DEPTH:  # only aliases get this far
            raise self.too_much("too large once its aliases are followed", node.start_mark)
        if isinstance(node, nodes.ScalarNode):
            return self._scalar(node, key)
        if node.tag not in _COLLECTIONS:
            self._refuse_tag(node, key)
        if isinstance(node, nodes.MappingNode):
            return self._section(node, key, depth)
        items = [self.node(item, key, depth + 1) for item in node.value]
        values = [item.plain() if isinstance(item, Section) else item.value for item in items]
        return Leaf(values, None, self._line(node))

    def _section(self, node: nodes.MappingNode, prefix: str, depth: int) -> Section:
        section = Section({}, self._line(node))
        for key_node, value_node in node.value:
            where = self._line(key_node)
            if not isinstance(key_node, nodes.ScalarNode):
                message = "a key has to be a word, not a list or mapping"
                self.problems.append(Problem(where, prefix, ABSENT, message, "Quote the key."))
                continue
            name = str(key_node.value)
            key = f"{prefix}.{name}" if prefix else name
            child = self.node(value_node, key, depth + 1)
            if name in section.children:
                first = section.children[name].location
                message = f"given twice; first at {first}"
                self.problems.append(
                    Problem(where, key, _plain(child), message, "Keep one of them.")
                )
                continue
            section.children[name] = _moved(child, where)
        return section

    def _scalar(self, node: nodes.ScalarNode, key: str) -> Leaf:
        where = self._line(node)
        try:
            value: Any = self._scalars.construct_object(node)
        except yaml.constructor.ConstructorError:
            self._refuse_tag(node, key)
            value = None
        except ValueError as error:  # 2026-02-31, or an integer of thousands of digits
            message = f"cannot be read: {error}"
            problem = Problem(
                where, key, str(node.value), message, "Put it in quotes to mean text."
            )
            self.problems.append(problem)
            value = None
        return Leaf(value, None if value is None else str(node.value), where)

    def _refuse_tag(self, node: nodes.Node, key: str) -> None:
        message = f"the tag {node.tag} is not allowed"
        hint = "Recipes hold plain data: text, numbers, true, false, null, lists and mappings."
        self.problems.append(Problem(self._line(node), key, ABSENT, message, hint))

    def _line(self, node: nodes.Node) -> Location:
        mark = node.start_mark
        if mark is None or not self._numbered:
            return Location(self._source)
        return Location(self._source, mark.line + 1)


def _plain(node: Node) -> Any:  # noqa: ANN401
    return node.plain() if isinstance(node, Section) else node.value


def _moved(node: Node, where: Location) -> Node:
    """Return the same node, located at its key, which a reader looks for."""
    if isinstance(node, Section):
        return Section(node.children, where)
    return Leaf(node.value, node.text, where)
