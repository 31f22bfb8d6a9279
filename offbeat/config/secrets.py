"""Recognises secrets by the name of a variable or a key, or by their form."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, cast

from offbeat.messages.redaction import SHORTEST, USER_IN_URL

REDACTED: Final = "REDACTED"
"""Replaces a secret in a recipe."""

_KEY: Final = re.compile(
    r"(?:^|[_-])(?:token|secret|password|passwd|passphrase|credentials?|authorization"
    r"|(?:api|access|secret|private)[_-]?key)$",
    re.IGNORECASE,
)
_MARKUP_TOKEN: Final = re.compile(
    r"^(?:bos|eos|pad|unk|sep|stop|start|end|mask)[_-]token$", re.IGNORECASE
)
_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def of_recipe(values: Mapping[str, Any]) -> set[str]:
    """Return, as text, the values of a recipe whose keys name a secret."""
    return {
        str(value)
        for key, value in _leaves(values)
        if is_secret_key(key) and len(str(value)) >= SHORTEST
    }


def is_secret_key(dotted: str) -> bool:
    """Return whether this key of a recipe, or of an override, holds a secret."""
    return any(
        _KEY.search(_CAMEL.sub("_", key)) and not _MARKUP_TOKEN.search(key)
        for key in dotted.split(".")
    )


def without_secrets(value: Any, secrets: Collection[str] = (), *, named: bool = False) -> Any:  # noqa: ANN401
    """Return the same structure with each secret replaced; a tuple becomes a list, as in YAML.

    ``named``: an enclosing key names a secret.
    """
    match value:
        case dict():
            entries = cast("dict[str, Any]", value)
            return {
                key: without_secrets(child, secrets, named=named or is_secret_key(key))
                for key, child in entries.items()
            }
        case list() | tuple():
            items = cast("list[Any]", value)
            return [without_secrets(item, secrets, named=named) for item in items]
        case str():
            known = USER_IN_URL.search(value) or any(secret in value for secret in secrets)
            return REDACTED if named or known else value
        case int() | float() if named and len(str(value)) >= SHORTEST:  # a password of digits
            return REDACTED
        case _:
            return value


def find_redacted_keys(values: object) -> Iterator[str]:
    """Yield the dotted key of each value that was redacted as a secret; a list is one value."""
    yield from dict.fromkeys(key for key, value in _leaves(values) if value == REDACTED)


def _leaves(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted key and the value of each text and number of a tree."""
    match value:
        case Mapping():
            for key, child in cast("Mapping[str, object]", value).items():
                yield from _leaves(child, f"{prefix}.{key}" if prefix else key)
        case list() | tuple():
            for child in cast("list[object]", value):
                yield from _leaves(child, prefix)
        case None | bool():
            pass
        case _:
            yield prefix, value
