"""Creates environments of the library verifiers from its configuration.

Only child processes import this module, because importing verifiers takes seconds.
"""
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false
# verifiers is an extra, and unknown if it is not installed.

from collections.abc import Mapping
from typing import Any, Final

from pydantic import TypeAdapter
from renderers import RendererConfig, create_renderer
from renderers.base import load_tokenizer
from verifiers.v1.configs.agent import AgentConfig, agent_config_fields
from verifiers.v1.env import Env
from verifiers.v1.runtimes import PrimeConfig, SubprocessConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from offbeat.plugins.task_libraries.verifiers_options import VerifiersOptions

_OWN_SAMPLING: Final = {"max_tokens"}
"""Sampling values that an environment may set. The trainer computes with all others."""


class UnfitEnvironment(Exception):
    """An environment with samples that could not be trained as they were drawn."""


def made_environment(options: VerifiersOptions) -> Any:  # noqa: ANN401 - an Env of the library
    """Return the environment. By default its role runs as a local process.

    Raises:
        UnfitEnvironment: It has several roles, or a role other than the trained model.
        Exception: Any error of the library or the taskset.
    """
    config = resolve_env_config(options.env)
    roles = agent_config_fields(config)
    if len(roles) != 1:
        raise UnfitEnvironment(
            f"it has {len(roles)} roles ({', '.join(roles)}), but a sample is the turns of one: "
            "choose an environment of one role"
        )
    ((name, role),) = roles.items()
    _check_role(name, role)
    if config.retries.max_retries or config.retries.rules:
        raise UnfitEnvironment("env.retries: leave it out, and set rollout.sample_retries")
    written = options.env.get(name)
    chosen = isinstance(written, dict) and "runtime" in written
    if not chosen and isinstance(role.runtime, PrimeConfig):  # a service, the library's default
        role = role.model_copy(update={"runtime": SubprocessConfig()})
        config = config.model_copy(update={name: role})
    environment: Env[Any] = load_environment(config)
    return environment


def renderer_config(renderer: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a config of renderers
    """Return the configuration for ``environment.renderer``, or None for the library's choice.

    Raises:
        pydantic.ValidationError: The library has no such renderer.
    """
    return TypeAdapter(RendererConfig).validate_python(dict(renderer)) if renderer else None


def _check_role(name: str, role: AgentConfig) -> None:
    if role.model is not None or role.client is not None:
        raise UnfitEnvironment(
            f"env.{name} names a separate model or client: leave both out, because the trained "
            "model plays the role"
        )
    if role.retries.max_retries or role.retries.rules:
        raise UnfitEnvironment(
            f"env.{name}.retries: leave it out, and set rollout.sample_retries: turns of a try that "
            "was given up must not be trained"
        )
    sampling = role.sampling.model_dump(exclude_unset=True) if role.sampling else {}
    if others := sorted(sampling.keys() - _OWN_SAMPLING):
        raise UnfitEnvironment(
            f"env.{name}.sampling sets {', '.join(others)}: leave it out, and set "
            "generator.sampling: the trainer computes with the recipe's"
        )


def renderer_name(renderer: Mapping[str, Any], tokenizer: str) -> str:
    """Return the class that renders messages for the model in this directory; "" without a model.

    Raises:
        Exception: As ``renderer_config``; any error of renderers for such a tokenizer.
    """
    config = renderer_config(renderer)
    return type(create_renderer(load_tokenizer(tokenizer), config)).__name__ if tokenizer else ""
