"""Libraries of tasks as environments: reasoning-gym and verifiers."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from offbeat.config.environment_traits import EnvironmentTraits
from offbeat.config.problems import Clash
from offbeat.environments.environment_plugin import Agent, PluginOfAgents, PluginOfEnvironments
from offbeat.messages.finding import Finding

if TYPE_CHECKING:
    from offbeat.config.run import RunConfig
    from offbeat.config.sections.environment import EnvironmentConfig
    from offbeat.environments.prompt_files import FilePrompts
    from offbeat.environments.text import Tokenizer
    from offbeat.plugins.task_libraries.gym_tasks import GymPrompts, ReasoningGym

_EPISODE: Final = "offbeat.plugins.task_libraries.verifiers_episode:play"
"""Agent function in a child that plays an episode of the library verifiers."""


class ReasoningGymPlugin(PluginOfEnvironments):
    """Asks the items of a task of reasoning-gym, and scores the answers."""

    traits = EnvironmentTraits("`options.task` of reasoning-gym.", makes_prompts=True)

    def make_prompts(
        self, config: "RunConfig", began_with: Mapping[str, str], working_dir: Path
    ) -> "GymPrompts":
        """Return prompts that identify an item of the task.

        Raises:
            BadEnvironment: The options have unknown keys or wrong types.
        """
        from offbeat.environments.factory import read_options
        from offbeat.plugins.task_libraries.gym_tasks import GymOptions, GymPrompts

        del began_with, working_dir
        rows, data = read_options(config.environment, GymOptions).rows, config.data
        return GymPrompts(rows, shuffle=data.shuffle, seed=config.seed, epochs=data.epochs)

    def make_environment(
        self, section: "EnvironmentConfig", tokenizer: "Tokenizer", working_dir: Path
    ) -> "ReasoningGym":
        """Return the environment of one worker, not started.

        Raises:
            BadEnvironment: The options have unknown keys or wrong types.
        """
        from offbeat.environments.factory import make_reward_target, read_options
        from offbeat.plugins.task_libraries.gym_tasks import REWARD, GymOptions, ReasoningGym

        target = make_reward_target(section, REWARD, working_dir)
        options = read_options(section, GymOptions)
        return ReasoningGym(tokenizer, target, section.reward_workers, options)

    def check(self, config: "RunConfig") -> Iterator[Finding]:
        """Check that the task can be created, and its question filled in."""
        from offbeat.plugins.task_libraries.checks import check_gym

        yield from check_gym(config)


class VerifiersPlugin(PluginOfAgents):
    """Plays episodes of an environment of verifiers."""

    traits = EnvironmentTraits(
        "`options.env` of verifiers.", makes_prompts=True, is_agent=True, renders_messages=True
    )

    def find_clashes(self, section: "EnvironmentConfig") -> Iterator[Clash]:
        """Yield a clash for a renderer that is set at an unused place."""
        if "renderer" in section.options:
            yield Clash(
                ("environment.options.renderer", "environment.name"),
                f"environment.options.renderer={section.options['renderer']} is not read: the "
                "renderer of every agent is one key",
                "Write it as environment.renderer.",
            )

    def make_prompts(
        self, config: "RunConfig", began_with: Mapping[str, str], working_dir: Path
    ) -> "FilePrompts":
        """Return the tasks as prompts.

        Raises:
            BadEnvironment: The options have unknown keys or wrong types.
            InputChanged: The tasks have changed since the run began.
            PromptFileError: They cannot be read.
        """
        from offbeat.environments.factory import read_options
        from offbeat.plugins.task_libraries.verifiers_options import VerifiersOptions
        from offbeat.plugins.task_libraries.verifiers_tasks import task_prompts

        options = read_options(config.environment, VerifiersOptions)
        return task_prompts(config, options, began_with, working_dir)

    def make_agent(self, section: "EnvironmentConfig", working_dir: Path, model_path: str) -> Agent:
        """Return the episodes of an environment, without starting their processes.

        Raises:
            BadEnvironment: The options have unknown keys or wrong types.
        """
        import msgspec

        from offbeat.environments.factory import read_options
        from offbeat.plugins.agents.factory import make_agent_function
        from offbeat.plugins.task_libraries.verifiers_options import VerifiersOptions

        options = {
            "tokenizer": str(working_dir / model_path),
            "renderer": dict(section.renderer),
            "options": msgspec.to_builtins(read_options(section, VerifiersOptions)),
        }
        return make_agent_function(section, _EPISODE, working_dir, "", options)

    def check_slowly(self, config: "RunConfig", working_dir: Path) -> Iterator[Finding]:
        """Create the environment and its renderer in another process, and name the renderer."""
        from offbeat.plugins.task_libraries.checks import check_verifiers

        yield from check_verifiers(config, working_dir)


REASONING_GYM: Final = ReasoningGymPlugin()
VERIFIERS: Final = VerifiersPlugin()
