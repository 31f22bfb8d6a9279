"""Checks of an agent: how its conversations are encoded, and how many episodes run at once."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers has no types for its configs and loading functions.

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from offbeat.config.run import RunConfig
from offbeat.environments.factory import BadEnvironment
from offbeat.environments.inputs import resolve_program
from offbeat.environments.tokenizer import load_tokenizer
from offbeat.messages.finding import Finding, error, ok, warning
from offbeat.messages.text import printable
from offbeat.plugins.agents.endpoint.bridges import bridge_renderer, make_bridge
from offbeat.plugins.agents.endpoint.chat import ChatMessage, Tools
from offbeat.plugins.agents.endpoint.chat_bridge import ChatBridge, TemplateRefused
from offbeat.plugins.agents.factory import episodes_at_once

_SUBJECT = "agent"
_PROBE: Final = (ChatMessage("system", "Be brief."), ChatMessage("user", "What is 2+3?"))
_TOOL: Final = (
    '{"type":"function","function":{"name":"add","description":"Add two numbers.","parameters":'
    '{"type":"object","properties":{"a":{"type":"number"}},"required":["a"]}}}'
)
_SHOWN: Final = 12  # tokens shown of a difference
_FIX: Final = (
    "Take a model that was trained on conversations, add chat_template.jinja to it, or name the "
    "renderer of its family in environment.renderer."
)


def check_agent(config: RunConfig) -> Iterator[Finding]:
    """Check how turns of a conversation are joined, and if the processes suffice for a group."""
    environment = config.environment
    if not environment.is_agent:
        return
    try:
        tokenizer = load_tokenizer(config)
    except (OSError, ValueError):
        return  # the model's checks report it
    try:
        bridge = make_bridge(tokenizer, bridge_renderer(environment), ())
    except BadEnvironment as bad:
        yield error(_SUBJECT, f"{bad}: no conversation can be encoded", _FIX)
        return
    if environment.name == "agent":
        yield _bridge_finding(config, tokenizer, bridge)
    episodes = environment.workers * environment.reward_workers * episodes_at_once(environment)
    seen = f"{episodes} episodes run at once; a group has {config.samples_per_group}"
    if episodes < config.samples_per_group:
        yield warning(
            _SUBJECT,
            f"{seen}, so most of rollout.deadline_s may pass before the last of them begins",
            "Raise environment.reward_workers: the processes of an agent mostly wait for the model.",
        )
    else:
        yield ok(_SUBJECT, seen)


def check_command(config: RunConfig, working_dir: Path) -> Iterator[Finding]:
    """Check that the program of an agent is found on this machine."""
    if not config.environment.command:
        return
    name = config.environment.command[0]
    if resolve_program(name, working_dir) is None:
        yield error(
            "environment",
            f"environment.command: {name} is not a program, from {working_dir} or on the PATH",
            "Write its path from the directory in which offbeat is started, and make it executable.",
        )
    else:
        yield ok("environment", f"program {name} is found")


def _bridge_finding(
    config: RunConfig,
    tokenizer: Any,  # noqa: ANN401 - of transformers
    bridge: ChatBridge,
) -> Finding:
    """Report how turns are joined, and why. Compare a renderer with the chat template."""
    path, chosen = config.model.path, config.environment.renderer
    if not chosen:
        is_refused = not _opening(bridge, (_TOOL,)) and _opening(bridge)
        tools = "; it shows no tools, so requests with tools are refused" if is_refused else ""
        return ok(
            _SUBJECT,
            f"turns are joined by the chat template of {path}, as no environment.renderer is named{tools}",
        )
    named = f"turns are joined by the renderer {chosen}, as environment.renderer says"
    if not tokenizer.chat_template:
        return ok(_SUBJECT, f"{named}; {path} has no chat template to compare it with")
    template = make_bridge(tokenizer, {}, ())
    for tools in ((_TOOL,), ()):
        ours, theirs = _opening(bridge, tools), _opening(template, tools)
        if ours != theirs:
            at = next(
                (at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
                min(len(ours), len(theirs)),
            )
            seen, expected = (
                printable(bridge.decode(ids[at : at + _SHOWN])) for ids in (ours, theirs)
            )
            return warning(
                _SUBJECT,
                f"{named}; it opens a conversation {'with' if tools else 'without'} a tool differently from "
                f"the chat template of {path} from token {at} on: {seen!r} and {expected!r}",
                "Name the renderer of the model's family, or leave environment.renderer out.",
            )
    return ok(_SUBJECT, f"{named}; it opens a conversation as the chat template of {path} does")


def _opening(bridge: ChatBridge, tools: Tools = ()) -> tuple[int, ...]:
    """Return the tokens of a short conversation, or none if it is refused."""
    for messages in (_PROBE, _PROBE[1:]):  # some templates refuse system messages
        try:
            return bridge.opening(messages, tools).token_ids
        except TemplateRefused:
            continue
    return ()
