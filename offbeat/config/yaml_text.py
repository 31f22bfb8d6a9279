"""Converts YAML text to a tree and back, within bounds against hostile or broken files.

Only plain data is accepted: a tag that would build a Python object is a problem. As in YAML 1.2 and
JSON, ``3e-4`` is a number, ``010`` is not 8, and ``12:30`` is text. A key that is set twice is a
problem, and so is the merge key ``<<``. Keys are text.

Writes the resolved configuration as a separate recipe, without secrets.
"""

# pyright: basic
# PyYAML has no types.

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import yaml
from yaml import events, nodes

from offbeat.config.problems import ABSENT, ConfigError, Location, Problem
from offbeat.config.run import RunConfig
from offbeat.config.secrets import without_secrets
from offbeat.config.tree import Leaf, Node, Section
from offbeat.messages.redaction import of_environment

MAX_TEXT_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 32
MAX_NODES: Final = 20_000  # aliases count each time they are used

_FLOAT: Final = "tag:yaml.org,2002:float"
_INTEGER: Final = "tag:yaml.org,2002:int"
_MERGE: Final = "tag:yaml.org,2002:merge"
_COLLECTIONS: Final = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_EXPONENT: Final = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")


_WHOLE: Final = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)$")
_FRACTION: Final = re.compile(
    r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)


class _RecipeLoader(yaml.SafeLoader):
    """Loads plain data, with the numbers of YAML 1.2.

    PyYAML reads YAML 1.1, where ``010`` is 8 and ``12:30`` is 750.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [each for each in resolvers if each[0] not in (_FLOAT, _INTEGER)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class RecipeDumper(yaml.SafeDumper):
    """Writes values that the loader reads back unchanged: the text ``3e-4`` gets quotes."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 -- the base class's parameter
        """Write equal values out each time, because readers of a run directory refuse aliases."""
        return True

    def represent_scalar(self, tag: str, value: str, style: str | None = None) -> nodes.ScalarNode:
        # In single quotes, YAML folds U+0085 and U+2028 like line ends.
        escaped = style is None and not value.isprintable()
        return super().represent_scalar(tag, value, '"' if escaped else style)


_RecipeLoader.add_implicit_resolver(_INTEGER, _WHOLE, list("-+0123456789"))
_RecipeLoader.add_implicit_resolver(_FLOAT, _FRACTION, list("-+.0123456789"))
for _yaml_class in (_RecipeLoader, RecipeDumper):
    _yaml_class.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+.0123456789"))


def parse(text: str, source: str, *, numbered: bool = True) -> tuple[Node, list[Problem]]:
    """Return the tree of one YAML document, and the problems that do not prevent reading it.

    Args:
        text: The document. An empty one is a null leaf.
        source: Name of the source in locations: a path, or the override.
        numbered: Whether a line number helps; an override has none.

    Raises:
        ConfigError: For a syntax error, a second document, or a document beyond the bounds.
    """
    reader = _Reader(source, numbered=numbered)
    try:
        _check_bounds(text, reader)
        root = yaml.compose(text, Loader=_RecipeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what, hint = ", ".join(filter(None, (error.problem, error.context))), _SYNTAX_HINT
        raise reader.unreadable(f"not valid YAML: {_on_one_line(what)}", hint, mark) from error
    except yaml.YAMLError as error:  # a character YAML does not allow
        raise reader.unreadable(f"not valid YAML: {_on_one_line(str(error))}", "") from error
    if root is None:
        return Leaf(None, None, Location(source)), []
    return reader.node(root, "", reader.location(root.start_mark)), reader.problems


_SYNTAX_HINT: Final = "Check indentation (spaces, no tabs), the space after a colon, and quotes."


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


def _check_bounds(text: str, reader: "_Reader") -> None:
    """Refuse a document that is too long or too deep, before any recursion into it."""
    if (size := len(text.encode(errors="surrogatepass"))) > MAX_TEXT_BYTES:
        raise reader.too_much(f"{size} bytes long; at most {MAX_TEXT_BYTES} are read")
    depth = 0
    for event in yaml.parse(text, Loader=_RecipeLoader):
        depth += isinstance(event, events.CollectionStartEvent)
        depth -= isinstance(event, events.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise reader.too_much(f"nested deeper than {MAX_DEPTH} levels", event.start_mark)


class _Reader:
    """Turns YAML nodes into a tree, collects problems and counts nodes."""

    def __init__(self, source: str, *, numbered: bool) -> None:
        self._source, self._numbered = source, numbered
        self._scalars = _RecipeLoader("")
        self._count = 0
        self.problems = list[Problem]()

    def location(self, mark: Any, *, column: bool = False) -> Location:  # noqa: ANN401 - yaml has no types
        if mark is None or not self._numbered:
            return Location(self._source)
        return Location(self._source, mark.line + 1, mark.column + 1 if column else None)

    def unreadable(self, message: str, hint: str, mark: Any = None) -> ConfigError:  # noqa: ANN401
        where = self.location(mark, column=True)
        return ConfigError((Problem(where, "", ABSENT, message, hint),))

    def too_much(self, what: str, mark: Any = None) -> ConfigError:  # noqa: ANN401
        hint = "A recipe is a short text; keep data in a separate file."
        return self.unreadable(f"this is {what}", hint, mark)

    def node(self, node: nodes.Node, key: str, where: Location, depth: int = 0) -> Node:
        """Return the tree of a node, located at its key, because readers look for the key."""
        self._count += 1
        if self._count > MAX_NODES or depth > MAX_DEPTH:  # only aliases can reach these bounds here
            raise self.too_much("too large once its aliases are followed", node.start_mark)
        if isinstance(node, nodes.ScalarNode):
            return self._scalar(node, key, where)
        if node.tag not in _COLLECTIONS:
            self._refuse_tag(node, key)
        if isinstance(node, nodes.MappingNode):
            return self._section(node, key, where, depth)
        items = [self.node(item, key, where, depth + 1) for item in node.value]
        return Leaf([item.plain() for item in items], None, where)

    def _section(
        self, node: nodes.MappingNode, prefix: str, where: Location, depth: int
    ) -> Section:
        section = Section({}, where)
        for key_node, value_node in node.value:
            at = self.location(key_node.start_mark)
            if not isinstance(key_node, nodes.ScalarNode):
                message = "a key has to be a word, not a list or mapping"
                self.problems.append(Problem(at, prefix, ABSENT, message, "Quote the key."))
                continue
            if key_node.tag == _MERGE:
                message = "the merge key << is not read: it would hide which value counts"
                hint = "Write the keys out, or put them into a recipe and name it in extends."
                self.problems.append(Problem(at, prefix, ABSENT, message, hint))
                continue
            name = str(key_node.value)
            key = f"{prefix}.{name}" if prefix else name
            child = self.node(value_node, key, at, depth + 1)
            first = section.children.setdefault(name, child)
            if first is not child:
                message = f"given twice; first at {first.location}"
                problem = Problem(at, key, child.plain(), message, "Keep one of them.")
                self.problems.append(problem)
        return section

    def _scalar(self, node: nodes.ScalarNode, key: str, where: Location) -> Leaf:
        value: Any = None
        try:
            value = self._scalars.construct_object(node)
        except yaml.constructor.ConstructorError:
            self._refuse_tag(node, key)
        except ValueError as error:  # 2026-02-31, or an integer of thousands of digits
            at, hint = self.location(node.start_mark), "Put it in quotes to mean text."
            problem = Problem(at, key, str(node.value), f"cannot be read: {error}", hint)
            self.problems.append(problem)
        return Leaf(value, None if value is None else str(node.value), where)

    def _refuse_tag(self, node: nodes.Node, key: str) -> None:
        at, message = self.location(node.start_mark), f"the tag {node.tag} is not allowed"
        hint = "Recipes hold plain data: text, numbers, true, false, null, lists and mappings."
        self.problems.append(Problem(at, key, ABSENT, message, hint))


_HEADER: Final = "# The configuration of this run, defaults filled in. It is a recipe: train it again unchanged.\n"


def to_yaml(config: RunConfig, environ: Mapping[str, str]) -> str:
    """Return YAML that loads as an equal configuration, except for secret values.

    Args:
        config: What to write. Paths stay unchanged: absolute after ``load_recipe``.
        environ: Environment variables. Values of variables that hold a secret, judging by their
            names, never appear in the result.
    """
    values = without_secrets(config.model_dump(), of_environment(environ))
    return _HEADER + yaml.dump(
        values, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True, width=100
    )
