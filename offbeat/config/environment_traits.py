"""Traits of environments by name: of the core's, and of those that plug-ins bring.

The model of section ``environment`` imports this module, so it imports no model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol, cast

from pydantic import PlainSerializer, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from offbeat.config.clash import Clash
from offbeat.doors import PluginUnusable, find_plugin, plugins_of

PLUGIN_UNUSABLE: Final = "plugin_unusable"
"""Type of the error of pydantic for a plug-in that is there and broken."""


@dataclass(frozen=True, slots=True)
class EnvironmentTraits:
    """Facts about an environment that the rules of a recipe depend on."""

    doc: str = ""
    """Its line in the documentation of ``environment.name``."""

    makes_prompts: bool = False
    """Whether it reads no file of prompts."""

    is_agent: bool = False
    """Whether its episodes call the model over HTTP, from processes of their own."""

    renders_messages: bool = False
    """Whether an agent sends tokens: then its endpoint needs no renderer."""


CORE_ENVIRONMENTS: Final[Mapping[str, EnvironmentTraits]] = {
    "arithmetic": EnvironmentTraits("addition.", makes_prompts=True),
    "digits": EnvironmentTraits("read a digit in a picture.", makes_prompts=True),
    "gsm8k": EnvironmentTraits("questions with a number as answer, from a file."),
    "function": EnvironmentTraits("a Python reward function."),
    "custom": EnvironmentTraits("an Environment class."),
    "agent": EnvironmentTraits(
        "an async function or program that calls the model over HTTP.", is_agent=True
    ),
    "demonstrations": EnvironmentTraits(
        "train on completions or conversations from a file, without engines."
    ),
    "stub": EnvironmentTraits(),
}


class _EnvironmentPlugin(Protocol):
    traits: EnvironmentTraits

    def find_clashes(self, section: Any) -> Iterator[Clash]: ...  # noqa: ANN401 -- a model above


def known_environments() -> dict[str, EnvironmentTraits]:
    """Return the environments of this package."""
    brought = cast("dict[str, _EnvironmentPlugin]", plugins_of("environment"))
    return {**CORE_ENVIRONMENTS, **{name: each.traits for name, each in brought.items()}}


def find_traits(name: str) -> EnvironmentTraits:
    """Return the traits of an environment.

    Raises:
        PluginUnusable: No package brings it, or its import fails.
    """
    return CORE_ENVIRONMENTS[name] if name in CORE_ENVIRONMENTS else _find(name).traits


def environment_clashes(name: str, section: object) -> Iterator[Clash]:
    """Yield settings in the section of an environment that its plug-in refuses."""
    if name not in CORE_ENVIRONMENTS:
        yield from _find(name).find_clashes(section)


def _find(name: str) -> _EnvironmentPlugin:
    return cast("_EnvironmentPlugin", find_plugin("environment", name))


def _accept_plugin(name: object, is_known: ValidatorFunctionWrapHandler) -> object:
    """Accept a known environment, or one that another package brings."""
    try:
        return is_known(name)
    except ValidationError:
        if not isinstance(name, str) or _is_absent(name):
            raise
        return name


def _is_absent(name: str) -> bool:
    try:
        _find(name)
    except PluginUnusable as unusable:
        if unusable.is_absent:
            return True
        problem = f"{unusable.subject}: {unusable.problem}"
        context = {"problem": problem, "fix": f"{unusable.fix}."}
        raise PydanticCustomError(PLUGIN_UNUSABLE, "{problem}", context) from None
    return False


if TYPE_CHECKING:
    EnvironmentName = str
else:
    EnvironmentName = Annotated[
        Literal[tuple(known_environments())],
        WrapValidator(_accept_plugin),
        PlainSerializer(str),  # that of a literal warns about the name of a plug-in
    ]

ENVIRONMENT_NAMES: Final = " ".join(
    f"{name}: {traits.doc}" for name, traits in known_environments().items() if traits.doc
)
"""Documentation of ``environment.name``."""
