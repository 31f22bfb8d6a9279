"""Base of every config model, and marks for its fields."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, Union, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model

from offbeat.config.problems import Clash


class RelativeToRecipe:
    """Marks a path that the loader makes absolute, relative to the recipe that contains it."""


class OneIsAList:
    """Marks a list of texts. A single text means a list of one."""


@dataclass(frozen=True, slots=True)
class InWords:
    """Words for a constraint that no number expresses, for messages and ``config explain``."""

    text: str


def is_uri(path: str) -> bool:
    """Return whether a path is a URI outside of the file system, such as s3://bucket.

    A path library may have replaced its two slashes by one.
    """
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", path) is not None


RecipePath = Annotated[str, RelativeToRecipe()]

RunName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100),
    InWords(
        "of at most 100 letters, digits, dots, dashes and underscores, a letter or digit first"
    ),
]
"""Name that is a valid directory name."""

SectionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=60)]
"""Section name chosen by a recipe. It has no dot, because a dot separates the parts of a key."""


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever YAML makes
    match value:
        case dict():
            entries = cast("dict[str, Any]", value)
            return {_plain(key): _plain(child) for key, child in entries.items()}
        case list():
            return [_plain(child) for child in cast("list[Any]", value)]
        case str():
            value.encode()  # raises for a lone surrogate: UnicodeEncodeError is a ValueError
        case float() if not math.isfinite(value):
            raise ValueError(f"{value} is not finite")
        case None | bool() | int() | float():
            pass
        case _:
            raise ValueError(f"{value!r} is a {type(value).__name__}")
    return value


Options = Annotated[
    dict[str, Any],
    AfterValidator(_plain),
    InWords("of text, finite numbers, true, false, null, and lists or mappings of these"),
]
"""Free-form values that are the same after crossing to another process as JSON."""


def default_choice(key: str, choice: str) -> BeforeValidator:
    """Return a validator that selects kind ``choice`` for a section without ``key``."""

    def choose(section: Any) -> Any:  # noqa: ANN401 - whatever YAML makes
        if isinstance(section, dict) and key not in section:
            return {key: choice, **cast("dict[str, Any]", section)}
        return cast("Any", section)

    return BeforeValidator(choose)


Kind = TypeVar("Kind", bound="Config")


def of_kind(kind: type[Kind], section: "Config") -> Kind:
    """Return ``section``, typed as the kind for which its reader was chosen.

    Raises:
        TypeError: The section has a different kind.
    """
    if not isinstance(section, kind):
        raise TypeError(f"{kind.__name__} is required, not {type(section).__name__}")
    return section


class Config(BaseModel):
    """Base class of all sections.

    An unknown key is an error, values never change, and every field has a docstring.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    def find_clashes(self) -> Iterator[Clash]:
        """Yield clashes between keys of this section, but no clashes with other sections."""
        yield from ()


def with_fields(core: type[Kind], fields: Mapping[str, Any]) -> type[Kind]:
    """Return a section of the same name with the fields that plug-ins add."""
    return create_model(
        core.__name__, __base__=core, __module__=core.__module__, __doc__=core.__doc__, **fields
    )


def make_choice(key: str, choice: str, sections: tuple[type[Config], ...]) -> Any:  # noqa: ANN401 -- a type
    """Return the type of a section that ``key`` selects from these models; default ``choice``."""
    marks = [default_choice(key, choice)]
    if len(sections) == 1:  # pydantic refuses a choice with one member
        return Annotated[sections[0], *marks]
    return Annotated[Union[sections], Field(discriminator=key), *marks]  # noqa: UP007 -- of a tuple
