"""Agents as an environment, with the endpoint and checks that every agent environment needs."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from offbeat.config.environment_traits import EnvironmentTraits, PromptFile
from offbeat.config.problems import Clash
from offbeat.config.user_code import CallForm
from offbeat.environments.environment_plugin import EnvironmentPlugin
from offbeat.messages.finding import Finding

if TYPE_CHECKING:
    from offbeat.config.run import RunConfig
    from offbeat.config.sections.environment import EnvironmentConfig
    from offbeat.plugins.agents.endpoint.agent_groups import AgentGroups


class AgentPlugin(EnvironmentPlugin):
    """Plays the user's function or program as an agent; ``factory`` creates the agent."""

    traits = EnvironmentTraits(
        "an async function or program that calls the model over HTTP.",
        is_agent=True,
        user_code="your agent function",
        call_form=CallForm(
            "an agent gets a task and a client",
            count=2,
            change="Write it as async def agent(task, client), and return one number.",
            is_async=True,
            parameters="task, client",
        ),
        prompt_file=PromptFile(
            "tasks: an agent makes none",
            "JSON Lines file; each row is the task of a call of the agent",
        ),
        reads_any_row=True,
        keys=frozenset({"command", "episodes_per_child"}),
        listed_after="custom",
    )

    def find_clashes(self, section: "EnvironmentConfig") -> Iterator[Clash]:
        """Yield settings that a program does not read or does not support."""
        if not section.command:
            return
        if section.target is not None or section.options:
            other = "target" if section.target is not None else "options"
            yield Clash(
                ("environment.command", f"environment.{other}"),
                f"environment.{other} is not used: the agent is the program environment.command",
                f"Leave environment.{other} out, and pass arguments in environment.command; or "
                "leave environment.command out.",
            )
        if section.episodes_per_child not in (None, 1):
            yield Clash(
                ("environment.episodes_per_child", "environment.command"),
                f"environment.episodes_per_child={section.episodes_per_child} is impossible: "
                "when an episode of a program ends, its process group is killed, with all "
                "processes that it left",
                "Leave environment.episodes_per_child out, and raise environment.reward_workers.",
            )

    def check(self, config: "RunConfig") -> Iterator[Finding]:
        """Check that a program is found on this machine."""
        from offbeat.plugins.agents.checks import check_command

        yield from check_command(config, Path.cwd())


class AgentsAtEndpoint:
    """Plays and checks the agents of any environment with episodes that call the model over HTTP.

    ``rollouts.worker`` and ``launch.checks.report`` declare its methods.
    """

    def make_agents(
        self,
        config: "RunConfig",
        tokenizer: Any,  # noqa: ANN401 -- of transformers
        working_dir: Path,
        began_with: Mapping[str, str],
        stop_token_ids: Sequence[int],
    ) -> "AgentGroups":
        """Create the endpoint and the agent processes of a worker, without starting them.

        Raises:
            BadEnvironment: No conversation can be encoded, or no agent can be created.
        """
        from offbeat.plugins.agents.endpoint.agent_groups import make_agents

        return make_agents(config, tokenizer, working_dir, began_with, stop_token_ids)

    def check_agent(self, config: "RunConfig") -> Iterator[Finding]:
        """Check how the turns of a conversation are joined, and how many episodes run at once."""
        from offbeat.plugins.agents.checks import check_agent

        yield from check_agent(config)


AGENT: Final = AgentPlugin()
AGENTS: Final = AgentsAtEndpoint()
