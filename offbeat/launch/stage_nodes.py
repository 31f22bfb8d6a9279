"""Downloads a model on every node of a Ray cluster at the same time."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# Ray declares functions without the types of their parameters.

import os
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from offbeat.actors.call import find_cause, lost
from offbeat.launch.cluster import start_ray
from offbeat.launch.environment import pass_on_variables
from offbeat.launch.hub_snapshot import HubSnapshot
from offbeat.launch.stage import stage_model
from offbeat.launch.stopping import stop_ray
from offbeat.messages.failures import OffbeatError


def stage_on_cluster(
    snapshot: HubSnapshot, target: Path, stall_s: float, say: Callable[[str], None]
) -> dict[str, OffbeatError]:
    """Download a model on every node of the cluster at ``RAY_ADDRESS``. Return failures by node.

    Raises:
        ClusterUnreachable: No cluster answers at ``RAY_ADDRESS``.
        TokenRefused: The cluster requires a token that this process does not have.
    """
    start_ray({})
    try:
        return stage_on_nodes(snapshot, dict.fromkeys(live_nodes(), target), stall_s, say)
    finally:
        stop_ray([])


def live_nodes() -> list[tuple[str, str]]:
    """Return id and address of each live node."""
    nodes = ray.nodes()
    return [(node["NodeID"], node["NodeManagerAddress"]) for node in nodes if node["Alive"]]


def stage_on_nodes(
    snapshot: HubSnapshot,
    target_by_node: Mapping[tuple[str, str], Path],
    stall_s: float,
    say: Callable[[str], None],
) -> dict[str, OffbeatError]:
    """Download a model to a directory on each node, and return failures by node name."""
    secrets = dict(pass_on_variables(os.environ, {}).secret)
    name_by_lines = dict[Any, str]()
    for (node, address), target in target_by_node.items():
        on_node = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(_stage_with).options(num_cpus=0, scheduling_strategy=on_node)
        lines = task.remote(secrets, snapshot, target, stall_s)
        name_by_lines[lines] = f"{address}/{node[:6]}"
    failures = dict[str, OffbeatError]()
    while name_by_lines:
        ready, _ = ray.wait(list(name_by_lines), num_returns=1)
        lines: Any = ready[0]
        name = name_by_lines[lines]
        try:
            say(f"{name}: {ray.get(next(lines))}")
            continue
        except StopIteration:
            say(f"{name}: done")
        except RayTaskError as error:
            failures[name] = find_cause(error, name, "staging")
        except RayError as error:
            failures[name] = lost(error, name, "staging")
        del name_by_lines[lines]
    return failures


def _stage_with(
    secrets: Mapping[str, str], snapshot: HubSnapshot, target: Path, stall_s: float
) -> Generator[str]:
    os.environ.update(secrets)
    yield from stage_model(snapshot, target, stall_s)
