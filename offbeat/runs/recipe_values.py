# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# PyYAML has types for few of its methods.
"""Values of a run's ``config.yaml``, by dotted key, from a file that anybody may have written.

A short YAML text can expand to a tree without end or of terabytes: an alias that repeats what
repeats another one, or collections in collections. No run writes either, so both are refused before
anything is built of them.
"""

from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError

from offbeat.messages.failures import OffbeatError
from offbeat.runs.directory import leaves
from offbeat.runs.limits import CONFIG_BYTES, CONFIG_DEPTH, CONFIG_KEYS, read_limited


class _PlainLoader(yaml.SafeLoader):
    """Refuses aliases, and trees deeper than any recipe."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:  # noqa: ANN401 -- a position or a key
        problem = ""
        if self.check_event(yaml.AliasEvent):
            problem = "an alias, which no run writes"
        elif self._depth >= CONFIG_DEPTH:
            problem = f"deeper than {CONFIG_DEPTH} levels"
        if problem:
            raise ComposerError(problem=problem, problem_mark=self.peek_event().start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def recipe_values(path: Path) -> dict[str, object]:
    """Return the values of a recipe by dotted key.

    Raises:
        OSError: The file cannot be read.
        FileTooLarge: It is larger than any that a run writes.
        NoRegularFile: It is a pipe, a socket or a device.
        yaml.YAMLError: It is no YAML, or a tree that no run writes.
    """
    tree: object = yaml.load(read_limited(path, CONFIG_BYTES), _PlainLoader)  # noqa: S506 -- a SafeLoader
    return dict(islice(leaves(tree), CONFIG_KEYS))


def readable_values(path: Path) -> dict[str, object]:
    """Return the values of a recipe by dotted key, or none if the file cannot be read."""
    try:
        return recipe_values(path)
    except (OSError, OffbeatError, yaml.YAMLError, UnicodeDecodeError):
        return {}
