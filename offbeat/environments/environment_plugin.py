"""Interface of an environment that a plug-in brings.

The models of a recipe import this module, so it imports none of them.

The model, as an agent is given it.
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
        """Yield settings that do not go together."""
        del section
        yield from ()

    def make_prompts(
        self, config: "RunConfig", began_with: Mapping[str, str], working_dir: Path
    ) -> "PromptSource | None":
        """Return the prompts of a run; None: they come from ``data.path``.

        ``began_with`` maps keys to the digests of the run's inputs at its start.

        Raises:
            BadEnvironment: It cannot use its options.
            InputChanged: The prompts are others than when the run began.
            PromptFileError: The prompts cannot be read.
        """
        del config, began_with, working_dir
        return None

    def make_held_out_prompts(self, config: "RunConfig") -> "PromptSource | None":
        """Return the prompts of evaluations without a file; None: the ones that are trained on.

        Raises:
            BadEnvironment: It cannot use its options.
        """
        del config
        return None

    def check(self, config: "RunConfig") -> Iterator[Finding]:
        """Yield findings for ``offbeat check``, in a moment."""
        del config
        yield from ()

    def check_slowly(self, config: "RunConfig", working_dir: Path) -> Iterator[Finding]:
        """Yield findings that take seconds, such as by another process."""
        del config, working_dir
        yield from ()


class PluginOfEnvironments(EnvironmentPlugin):
    """Makes an environment that asks the engines itself."""

    @abstractmethod
    def make_environment(
        self, section: "EnvironmentConfig", tokenizer: "Tokenizer", working_dir: Path
    ) -> "Environment":
        """Return the environment of one worker, not started.

        Raises:
            BadEnvironment: It cannot use its options.
        """


class Agent(Protocol):
    """Plays episodes, each of which calls the model of its client over HTTP."""

    @property
    def episodes(self) -> int:
        """Return how many episodes run at once."""
        ...

    async def start(self) -> None:
        """Start its processes. Called once, before any other method."""
        ...

    async def close(self) -> None:
        """End its processes. No episode may be running."""
        ...

    async def run(self, task: "RolloutTask", client: "AgentClient") -> "NamedRewards":
        """Play one episode and return its rewards; an episode that is cancelled is ended.

        Raises:
            EnvironmentUnavailable: Something that it depends on is out of service.
            RolloutFailed: The episode failed.
        """
        ...


class PluginOfAgents(EnvironmentPlugin):
    """Makes agents, which call the model over HTTP; its traits have ``is_agent``."""

    @abstractmethod
    def make_agent(self, section: "EnvironmentConfig", working_dir: Path, model_path: str) -> Agent:
        """Return the agent of one worker; its processes are not started.

        Raises:
            BadEnvironment: It cannot use its options.
        """


def find_environment(name: str) -> EnvironmentPlugin | None:
    """Return the plug-in of an environment, or None if the core has the environment.

    Raises:
        PluginUnusable: No package brings it, or its import fails.
    """
    if name in CORE_ENVIRONMENTS:
        return None
    return cast("EnvironmentPlugin", find_plugin("environment", name))


class AgentClient(msgspec.Struct, frozen=True):
    """Address of the model for one sample: what any OpenAI client is created with.

    Requests with ``api_key`` are recorded as turns of this sample. The key ends with the sample.
    """

    base_url: str
    api_key: str
    model: str

    def __repr__(self) -> str:
        return f"AgentClient(base_url={self.base_url!r}, model={self.model!r})"  # never the key
