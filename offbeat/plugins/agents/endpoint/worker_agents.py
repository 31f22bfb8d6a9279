"""Makes the agents of an environment worker."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.config.limits import max_sample_tokens
from offbeat.config.run import RunConfig
from offbeat.generators.end_tokens import end_ids_of
from offbeat.plugins.agents.factory import make_agent

if TYPE_CHECKING:
    from offbeat.plugins.agents.endpoint.agent_groups import AgentGroups


def make_agents(
    config: RunConfig,
    tokenizer: Any,  # noqa: ANN401 -- of transformers
    working_dir: Path,
    began_with: Mapping[str, str],
    stop_token_ids: Sequence[int],
) -> "AgentGroups":
    """Create the endpoint and the agent processes of a worker; nothing is started yet.

    Raises:
        BadEnvironment: As ``make_bridge``: no conversation can be encoded.
    """
    # Packages that other environments do without.
    from offbeat.plugins.agents.endpoint.agent_groups import AgentGroups  # noqa: PLC0415
    from offbeat.plugins.agents.endpoint.bridges import bridge_renderer, make_bridge  # noqa: PLC0415
    from offbeat.plugins.agents.endpoint.session import SessionLimits  # noqa: PLC0415

    environment = config.environment
    ends = [*end_ids_of(config.model.path), *stop_token_ids]
    bridge = make_bridge(tokenizer, bridge_renderer(environment), ends)
    agent = make_agent(environment, working_dir, began_with, model_path=config.model.path)
    rollout = config.rollout
    limits = SessionLimits(
        max_branches=rollout.max_branches, max_sample_tokens=max_sample_tokens(config)
    )
    return AgentGroups(agent, bridge, limits, rollout.branches)
