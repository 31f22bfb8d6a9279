"""Checks that the plug-in of agents brings."""

from collections.abc import Iterator
from typing import Protocol, cast

from offbeat.config.run import RunConfig
from offbeat.doors import find_plugin
from offbeat.messages.finding import Finding


class AgentChecks(Protocol):
    """Checks of an environment whose episodes call the model over HTTP."""

    def check_agent(self, config: RunConfig) -> Iterator[Finding]:
        """Check what joins the turns of a conversation, and how many episodes run at once."""
        ...


def agent_checks() -> AgentChecks:
    """Return the checks of the plug-in.

    Raises:
        PluginUnusable: Its folder is not there, or its import fails.
    """
    return cast("AgentChecks", find_plugin("agents", "endpoint"))
