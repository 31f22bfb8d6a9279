"""The resolved configuration as a recipe of its own, without secrets."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import yaml

from offbeat.config.run import RunConfig
from offbeat.config.yaml_text import RecipeDumper

REDACTED: Final = "REDACTED"

_SECRET_KEY: Final = re.compile(
    r"(?:^|[_-])(?:token|secret|password|passwd|credentials?|api[_-]?key)$", re.IGNORECASE
)
_MARKUP_TOKEN: Final = re.compile(
    r"^(?:bos|eos|pad|unk|sep|stop|start|end|mask)[_-]token$", re.IGNORECASE
)
_SECRET_VARIABLE: Final = re.compile(r"_(?:API_KEY|TOKEN|SECRET|PASSWORD)$")
_SHORTEST_SECRET: Final = 8
"""A shorter value of such a variable, ``1`` or ``true``, is a switch and would redact half the file."""

_HEADER: Final = "# The configuration of this run, defaults filled in. It is a recipe: train it again as it stands.\n"


def to_yaml(config: RunConfig, environ: Mapping[str, str]) -> str:
    """YAML that loads as an equal configuration, except for values that are secrets.

    Args:
        config: What to write. Paths stay as they are: absolute after ``load_recipe``.
        environ: Environment variables; values of those whose name ends in ``_API_KEY``, ``_TOKEN``,
            ``_SECRET`` or ``_PASSWORD`` never appear in the result.
    """
    secrets = [
        value
        for name, value in environ.items()
        if _SECRET_VARIABLE.search(name) and len(value) >= _SHORTEST_SECRET
    ]
    values = _map_leaves(
        config.model_dump(),
        lambda key, value: REDACTED if _is_secret(key, value, secrets) else value,
    )
    return _HEADER + yaml.dump(
        values, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True, width=100
    )


def _is_secret(key: str, value: object, secrets: list[str]) -> bool:
    if not isinstance(value, str):
        return False
    named = bool(_SECRET_KEY.search(key)) and not _MARKUP_TOKEN.search(key)
    return named or any(secret in value for secret in secrets)


def _map_leaves(value: Any, change: Callable[[str, Any], Any], key: str = "") -> Any:  # noqa: ANN401
    """The same structure with every leaf changed; a tuple becomes a list, as YAML has it."""
    match value:
        case dict():
            entries = cast("dict[str, Any]", value)
            return {name: _map_leaves(item, change, name) for name, item in entries.items()}
        case list() | tuple():
            items = cast("list[Any]", value)
            return [_map_leaves(item, change, key) for item in items]
        case _:
            return change(key, value)
