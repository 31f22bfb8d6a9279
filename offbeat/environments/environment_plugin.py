"""Defines the interface of an environment plug-in, and the model's address as agents receive it.

The models of a recipe import this module, so it imports none of these models.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import msgspec

from offbeat.config.environment_traits import CORE_ENVIRONMENTS, EnvironmentTraits
from offbeat.config.problems import Clash
from offbeat.doors import find_plugin
from offbeat.messages.finding import Finding

if TYPE_CHECKING:
    from offbeat.config.run import RunConfig
    from offbeat.config.sections.environment import EnvironmentConfig
    from offbeat.environments.prompts import PromptSource
    from offbeat.environments.protocol import Environment
    from offbeat.environments.reward_value import NamedRewards
    from offbeat.environments.text import Tokenizer
    from offbeat.messages.groups import RolloutTask


class EnvironmentPlugin(ABC):
    """Makes the prompts of one environment, and the environment of each worker.

    A plug-in derives from ``PluginOfEnvironments`` or ``PluginOfAgents``.
    """

    traits: EnvironmentTraits

    def find_clashes(self, section: "EnvironmentConfig") -> Iterator[Clash]:
        """Yield settings that conflict."""
        del section
        yield from ()

    def make_prompts(
        self, config: "RunConfig", began_with: Mapping[str, str], working_dir: Path
    ) -> "PromptSource | None":
        """Return the prompts of a run, or None if they come from ``data.path``.

        ``began_with`` maps recipe keys to the digests that the run's inputs had at its start.

        Raises:
            BadEnvironment: It cannot use its options.
            InputChanged: The prompts have changed since the run began.
            PromptFileError: The prompts cannot be read.
        """
        del config, began_with, working_dir
        return None

    def make_held_out_prompts(self, config: "RunConfig") -> "PromptSource | None":
        """Return the prompts of evaluations without a file, or None for the training prompts.

        Raises:
            BadEnvironment: It cannot use its options.
        """
        del config
        return None

    def check(self, config: "RunConfig") -> Iterator[Finding]:
        """Yield findings for ``offbeat check``. This must be fast."""
        del config
        yield from ()

    def check_slowly(self, config: "RunConfig", working_dir: Path) -> Iterator[Finding]:
        """Yield findings that take seconds to compute, for example in another process."""
        del config, working_dir
        yield from ()


class PluginOfEnvironments(EnvironmentPlugin):
    """Makes an environment that calls the engines itself."""

    @abstractmethod
    def make_environment(
        self, section: "EnvironmentConfig", tokenizer: "Tokenizer", working_dir: Path
    ) -> "Environment":
        """Return the environment of one worker, before its ``start``.

        Raises:
            BadEnvironment: It cannot use its options.
        """


class Agent(Protocol):
    """Plays episodes. Each calls the model over HTTP, at the address in its ``AgentClient``."""

    @property
    def episodes(self) -> int:
        """Return how many episodes run at once."""
        ...

    async def start(self) -> None:
        """Start the agent's processes. Called once, before any other method."""
        ...

    async def close(self) -> None:
        """Stop the agent's processes. No episode may be running."""
        ...

    async def run(self, task: "RolloutTask", client: "AgentClient") -> "NamedRewards":
        """Play one episode and return its rewards. A cancelled episode is stopped.

        Raises:
            EnvironmentUnavailable: Something that the agent depends on is out of service.
            RolloutFailed: The episode failed.
        """
        ...


class PluginOfAgents(EnvironmentPlugin):
    """Makes agents, which call the model over HTTP. The plug-in's traits must have ``is_agent``."""

    @abstractmethod
    def make_agent(self, section: "EnvironmentConfig", working_dir: Path, model_path: str) -> Agent:
        """Return the agent of one worker, before its processes start.

        Raises:
            BadEnvironment: It cannot use its options.
        """


def find_environment(name: str) -> EnvironmentPlugin | None:
    """Return the plug-in of an environment, or None if the core has the environment.

    Raises:
        PluginUnusable: No package has it, or its import fails.
    """
    if name in CORE_ENVIRONMENTS:
        return None
    return cast("EnvironmentPlugin", find_plugin("environment", name))


class AgentClient(msgspec.Struct, frozen=True):
    """Address of the model for one sample, as arguments for any OpenAI client.

    Requests with ``api_key`` are recorded as turns of this sample. The key expires with the sample.
    """

    base_url: str
    api_key: str
    model: str

    def __repr__(self) -> str:
        return f"AgentClient(base_url={self.base_url!r}, model={self.model!r})"  # never the key
