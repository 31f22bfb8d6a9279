"""Protocols of the plug-in of agents, as a worker uses it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from offbeat.config.run import RunConfig
from offbeat.doors import find_plugin
from offbeat.messages.groups import Receipt
from offbeat.rollouts.calls import EngineClient
from offbeat.rollouts.samples import SampleFailurePolicy
from offbeat.transfer_queue.schema import Columns


class AgentPlayer(Protocol):
    """Plug-in that plays the groups of environments with ``is_agent``."""

    def make_agents(
        self,
        config: RunConfig,
        tokenizer: Any,  # noqa: ANN401 -- of transformers
        working_dir: Path,
        began_with: Mapping[str, str],
        stop_token_ids: Sequence[int],
    ) -> "WorkerAgents":
        """Create the agents of a worker; nothing is started yet.

        ``config`` is the view of their environment. ``stop_token_ids`` end a response.

        Raises:
            BadEnvironment: No conversation can be encoded, or no agent be made.
        """
        ...


class WorkerAgents(Protocol):
    """Agents of a worker, which play the episodes of a group in processes of the user's code."""

    async def start(self) -> None:
        """Start the agents. Called once, before any other method."""
        ...

    async def close(self) -> None:
        """Stop the agents. No group may be running."""
        ...

    async def run_group(
        self, engine: EngineClient, policy: SampleFailurePolicy
    ) -> tuple[Receipt, Columns]:
        """Play an episode per sample of the engine client's task, score and pack them."""
        ...


def find_agent_player() -> AgentPlayer:
    """Return the plug-in of agents.

    Raises:
        PluginUnusable: Its folder is not there, or its import fails.
    """
    return cast("AgentPlayer", find_plugin("agents", "endpoint"))
