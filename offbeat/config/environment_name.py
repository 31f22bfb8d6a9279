"""Type of ``environment.name``: a name of the core, of a plug-in here, or of another package."""

from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import PlainSerializer, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from offbeat.config.environment_traits import find_environment_plugin, known_environments
from offbeat.doors import NoSuchPlugin, PluginUnusable

PLUGIN_UNUSABLE: Final = "plugin_unusable"
"""Type of the pydantic error for an installed but broken plug-in."""


def _accept_plugin(name: object, is_known: ValidatorFunctionWrapHandler) -> object:
    """Accept a known environment, or an environment of another package."""
    try:
        return is_known(name)
    except ValidationError:
        if not isinstance(name, str) or _is_absent(name):
            raise
        return name


def _is_absent(name: str) -> bool:
    try:
        find_environment_plugin(name)
    except NoSuchPlugin:
        return True
    except PluginUnusable as unusable:
        raise unusable_error(unusable) from None
    return False


def unusable_error(unusable: PluginUnusable, fix: str = "") -> PydanticCustomError:
    """Return the error of a value that names an unusable plug-in; ``fix`` replaces its fix."""
    problem = f"{unusable.subject}: {unusable.problem}"
    context = {"problem": problem, "fix": f"{fix or unusable.fix}."}
    return PydanticCustomError(PLUGIN_UNUSABLE, "{problem}", context)


if TYPE_CHECKING:
    EnvironmentName = str
else:
    EnvironmentName = Annotated[
        Literal[tuple(known_environments())],
        WrapValidator(_accept_plugin),
        PlainSerializer(str),  # a literal's serializer warns about the name of a plug-in
    ]

ENVIRONMENT_NAMES: Final = " ".join(
    f"{name}: {traits.doc}" for name, traits in known_environments().items() if traits.doc
)
"""Documentation of ``environment.name``."""
