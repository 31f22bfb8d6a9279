"""Traits of environments by name, in the core and in plug-ins.

Plug-ins import this module, and the models of a recipe load plug-ins. So importing it neither
imports a model nor searches for plug-ins.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

from offbeat.config.problems import Clash
from offbeat.config.user_code import REWARD, CallForm
from offbeat.doors import find_plugin, find_plugins


@dataclass(frozen=True, slots=True)
class PromptFile:
    """The prompt file that an environment reads."""

    missing: str
    """Name of the missing thing if there is no file. A message puts it after "has no"."""

    rows: str
    """Description of the file and its rows. A message puts it after "Set data.path to a"."""


@dataclass(frozen=True, slots=True)
class EnvironmentTraits:
    """Facts about an environment that the rules of a recipe depend on."""

    doc: str = ""
    """Its line in the documentation of ``environment.name``."""

    makes_prompts: bool = False
    """Whether it reads no prompt file."""

    is_agent: bool = False
    """Whether its episodes call the model over HTTP, from separate processes."""

    renders_messages: bool = False
    """Whether an agent sends tokens, so that its endpoint needs no renderer."""

    user_code: str = ""
    """Name in messages of the object in ``environment.target``. Empty: it reads no target."""

    call_form: CallForm | None = None
    """The form of the function that ``environment.target`` names, or None if it names none."""

    prompt_file: PromptFile | None = None
    """The file that it needs, or None if it needs no file or reports a missing one itself."""

    reads_any_row: bool = False
    """Whether a file's row may have any keys, and needs neither ``prompt`` nor ``messages``."""

    keys: frozenset[str] = frozenset()
    """Keys of the section that it reads and most environments refuse."""

    held_out: str = ""
    """Description of the prompts of evaluations without a file. Empty: the training prompts."""

    listed_after: str = ""
    """Name of the environment that precedes this one in lists of all names. Empty: this one is
    last."""


CORE_ENVIRONMENTS: Final[Mapping[str, EnvironmentTraits]] = {
    "arithmetic": EnvironmentTraits("addition.", makes_prompts=True),
    "gsm8k": EnvironmentTraits(
        "questions with a number as answer, from a file.",
        prompt_file=PromptFile(
            "prompts of its own", "file with `question` and `answer` in each row"
        ),
    ),
    "function": EnvironmentTraits(
        "a Python reward function.",
        user_code="the reward function",
        call_form=REWARD,
        prompt_file=PromptFile(
            "prompts: a reward function makes none",
            "file with a `prompt` or `messages` in each row",
        ),
    ),
    "custom": EnvironmentTraits(
        "an Environment class.", user_code="your Environment class", call_form=CallForm()
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
    """Return the environments of this package, in display order."""
    known = list(CORE_ENVIRONMENTS.items())
    for name, plugin in cast("dict[str, _EnvironmentPlugin]", find_plugins("environment")).items():
        names, before = [each for each, _ in known], plugin.traits.listed_after
        known.insert(
            names.index(before) + 1 if before in names else len(known), (name, plugin.traits)
        )
    return dict(known)


def find_traits(name: str) -> EnvironmentTraits:
    """Return the traits of an environment.

    Raises:
        PluginUnusable: No package provides it, or its import fails.
    """
    return (
        CORE_ENVIRONMENTS[name]
        if name in CORE_ENVIRONMENTS
        else find_environment_plugin(name).traits
    )


def find_environment_plugin(name: str) -> _EnvironmentPlugin:
    """Return the plug-in of an environment that is not in the core.

    Raises:
        PluginUnusable: No package provides it, or its import fails.
    """
    return cast("_EnvironmentPlugin", find_plugin("environment", name))
