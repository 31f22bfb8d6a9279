"""Plays one episode of an environment of verifiers, in a reward child, at its worker's endpoint.

The library's training client renders messages to tokens and requests tokens over
``/inference/v1/generate``. The endpoint records the sent and the drawn tokens, as for any other
agent. The library's trace is only read for rewards and failures.
"""
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# verifiers is an extra, and unknown if it is not installed.

import os
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

import msgspec
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.types import SamplingConfig

from offbeat.environments.environment_plugin import AgentClient
from offbeat.environments.reward_value import BadReward, unavailable
from offbeat.messages.text import printable
from offbeat.plugins.task_libraries.verifiers_library import made_environment, renderer_config
from offbeat.plugins.task_libraries.verifiers_options import VerifiersOptions

_KEY_VARIABLE: Final = "OFFBEAT_SAMPLE_API_KEY"
"""Holds the token of the episode. The library passes no variable of such a name to programs."""

_INFRASTRUCTURE: Final = frozenset(
    {"SandboxError", "TunnelError", "InterceptionError", "ToolsetError"}
)
"""Errors of the library that the model did not cause."""

_SERVER_ERROR: Final = 500  # minimum HTTP status of a failed service
_ENDED_BY_LIMIT: Final = "agent_timeout"  # limit of the environment's author: score the work so far
_TOTAL: Final = "reward"
_TAKEN: Final = (_TOTAL, "answer")
"""Names with a different meaning in an agent's result: the trained value, and the final answer."""


async def play(
    task: dict[str, Any],
    client: AgentClient,
    *,
    tokenizer: str,
    options: dict[str, Any],
    renderer: dict[str, Any],
) -> object:
    """Play the episode of a task; return its rewards by name, or why it has none.

    ``tokenizer`` is the directory of the model. ``options`` and ``renderer`` come from the recipe.
    """
    chosen = msgspec.convert(options, VerifiersOptions)
    environment = _environment(msgspec.json.encode(chosen))
    os.environ[_KEY_VARIABLE] = client.api_key  # one episode at a time in a process
    context = ModelContext(
        model=client.model,
        client=TrainClientConfig(
            base_url=client.base_url,
            api_key_var=_KEY_VARIABLE,
            renderer=renderer_config(renderer),
            renderer_model_name=tokenizer,
        ),
        sampling=SamplingConfig(),  # the endpoint uses the recipe's
    )
    kind = type(environment.taskset).task_type()
    data = kind.data_type().model_validate(task)
    async with environment.serving():
        episode = await environment.run_episode(
            kind(data, environment.config.taskset.task), context
        )
    return _rewards(episode)


@lru_cache(maxsize=1)
def _environment(encoded_options: bytes) -> Any:  # noqa: ANN401 - an Env of the library
    return made_environment(msgspec.json.decode(encoded_options, type=VerifiersOptions))


def _rewards(episode: Any) -> object:  # noqa: ANN401 - an Episode of the library
    """Return the rewards and metrics of a finished episode, or why they are not a reward."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        return _failure(errors)
    if len(episode.traces) != 1:
        detail = f"the episode has {len(episode.traces)} traces, but a sample must have exactly one"
        return BadReward("verifiers_traces", detail)
    (trace,) = episode.traces
    unscored = [name for name, each in trace.rewards.items() if each is None]
    if trace.is_timeout and (unscored or trace.stop_condition != _ENDED_BY_LIMIT):
        return unavailable(f"verifiers ended the episode: {trace.stop_condition}")
    if unscored or not trace.rewards:
        detail = f"of the rewards of the task, {', '.join(unscored) or 'none'}"
        detail += " was not scored" if unscored else " exists: add one with @vf.reward"
        return BadReward("reward_none", detail)
    named = {name: each.score for name, each in trace.rewards.items()}
    for name, each in trace.metrics.items():
        if each is not None:
            named[f"metric_{name}" if name in named else name] = each
    for name in _TAKEN:
        if name in named:
            named[f"{name}_score"] = named.pop(name)
    return named | {_TOTAL: trace.reward}


def _failure(errors: Iterable[Any]) -> BadReward:
    """Return why an episode failed: its first infrastructure error or 5xx, else its first error."""
    found = list(errors)
    said = [printable(f"{each.type}: {each.message}") for each in found]
    for each, text in zip(found, said, strict=True):
        if each.type in _INFRASTRUCTURE or (each.status_code or 0) >= _SERVER_ERROR:
            return unavailable(f"verifiers: {text}")
    return BadReward("verifiers_failed", said[0] if said else "verifiers: the episode is not ok")
