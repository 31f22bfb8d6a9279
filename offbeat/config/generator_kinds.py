"""Type of section ``generator``: a kind of the core, of a plug-in here, or of another package."""

import functools
import operator
from typing import TYPE_CHECKING, Annotated, Final, cast

from pydantic import (
    Field,
    SerializeAsAny,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from offbeat.config.base import default_choice
from offbeat.config.engine_plugin import CORE_ENGINES, EnginePlugin, find_engine, known_engines
from offbeat.config.sections.environment import PLUGIN_UNUSABLE, unusable_error
from offbeat.config.sections.generator import (
    EmbeddedGeneratorConfig,
    ModelGeneratorConfig,
    NoGeneratorConfig,
    PluginGeneratorConfig,
    StubGeneratorConfig,
)
from offbeat.doors import NoSuchPlugin, PluginUnusable, is_in_package

_KNOWN: Final = (*CORE_ENGINES, *known_engines())


def find_generator_section(backend: str) -> type[PluginGeneratorConfig] | None:
    """Return the section of an engine of another package, or None if no package has the engine."""
    try:
        plugin = None if backend in _KNOWN else find_engine(backend)
    except PluginUnusable:
        return None  # validation of the section reports the reason
    return None if plugin is None else plugin.section


def _accept_plugin(section: object, of_known: ValidatorFunctionWrapHandler) -> object:
    """Validate a kind of this package, or a kind of another package."""
    if isinstance(section, dict):
        backend = cast("dict[str, object]", section).get("backend")
    else:
        backend = getattr(section, "backend", None)
    if not isinstance(backend, str) or backend in _KNOWN:
        return of_known(section)
    plugin = _find(backend)
    if plugin is None:
        return of_known(section)  # raises: the name is unknown
    try:
        return plugin.section.model_validate(section)
    except ValidationError as refused:
        fields = plugin.section.model_fields
        own = [
            each
            for each in refused.errors(include_url=False)
            if not set(each["loc"][:1]) <= ModelGeneratorConfig.model_fields.keys()
        ]
        if not own:
            raise
        problem = "; ".join(
            f"{'.'.join(map(str, ('generator', *each['loc'])))}: {each['msg']}" for each in own
        )
        context = {"problem": problem, "fix": f"Its keys: {', '.join(fields)}."}
        raise PydanticCustomError(PLUGIN_UNUSABLE, "{problem}", context) from None


def _find(backend: str) -> EnginePlugin | None:
    """Return the plug-in of a kind from another package, or None if no package provides it."""
    try:
        return find_engine(backend)
    except NoSuchPlugin as absent:
        if not is_in_package("engine", backend):
            return None
        fix = f"Use one of {', '.join(_KNOWN)}, or install offbeat with its plug-in {backend}"
        raise unusable_error(absent, fix) from None
    except PluginUnusable as unusable:
        raise unusable_error(unusable) from None


if TYPE_CHECKING:
    GeneratorConfig = (
        EmbeddedGeneratorConfig | PluginGeneratorConfig | StubGeneratorConfig | NoGeneratorConfig
    )
else:
    GeneratorConfig = Annotated[
        functools.reduce(
            operator.or_,
            (
                EmbeddedGeneratorConfig,
                *(plugin.section for plugin in known_engines().values()),
                StubGeneratorConfig,
                NoGeneratorConfig,
            ),
        ),
        Field(discriminator="backend"),
        SerializeAsAny(),
        default_choice("backend", "embedded"),
        WrapValidator(_accept_plugin),
    ]
