"""Puts a model on the local disk of every node of the cluster: ``offbeat stage``."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# Ray declares functions without the types of their parameters.

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from offbeat.actors.handles import Handle
from offbeat.actors.staging_actor import ModelReaderActor, RayStagingJob, StagingActor
from offbeat.launch.cluster import start_ray
from offbeat.launch.stopping import stop_ray
from offbeat.messages.failures import OffbeatError
from offbeat.staging.hub_model import HubModel, downloaded
from offbeat.staging.manifest import ModelManifest, SourceStalled, shortened
from offbeat.staging.outcome import NodeOutcome, as_node_outcome
from offbeat.staging.progress import ProgressMeter
from offbeat.staging.source import pickles_of, read_manifest
from offbeat.staging.thread_job import ThreadJob
from offbeat.staging.watchdog import Stalled, watch

T = TypeVar("T")
_AT_SOURCE = "this machine"
_READS = 8  # concurrent reads of nodes that do not see the source; each needs a thread and 8 MiB


@dataclass(frozen=True, slots=True)
class StagingRequest:
    """A model to stage, and the directory to put it into on each node."""

    model: Path | HubModel
    target: Path
    stall_s: float
    runtime_env: Mapping[str, str]


class SystemClock:
    """``WatchClock`` of this machine."""

    def now_s(self) -> float:
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


def stage(request: StagingRequest, say: Callable[[str], None]) -> dict[str, NodeOutcome]:
    """Copy a model to every node of the cluster that ``RAY_ADDRESS`` names; return the outcomes.

    Raises:
        NothingToStage: The model cannot be read.
        SourceStalled: Its disk or the hub stands still; what reads it goes on in threads.
        RayNotStarted: No cluster was started on this machine.
        ClusterUnreachable: There is no cluster at ``RAY_ADDRESS``.
        TokenRefused: It requires a token that this process does not have.
    """
    start_ray(request.runtime_env)
    try:
        model, stall_s = request.model, request.stall_s
        if isinstance(model, HubModel):
            what = f"download of {model.name}"
            here = awaited(partial(downloaded, model), what, stall_s, say)
            model, pickles = here.folder, here.pickles
        else:
            pickles = pickles_of(model)
        manifest = awaited(partial(read_manifest, model), f"reading of {model}", stall_s, say)
        say(f"{len(manifest.files)} files, {manifest.nbytes:,} bytes, read once at {model}")
        if pickles:
            say(f"Left out, since pickles run code when they are loaded: {shortened(pickles)}")
        target_by_node = dict.fromkeys(node_ids(), request.target)
        return stage_on(target_by_node, model, manifest, stall_s, say)
    finally:
        stop_ray([])


def node_ids() -> list[str]:
    """Return the ids of the nodes that are alive."""
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


def stage_on(
    target_by_node: Mapping[str, Path],
    source: Path,
    manifest: ModelManifest,
    stall_s: float,
    say: Callable[[str], None],
) -> dict[str, NodeOutcome]:
    """Copy a model to a directory of each of these nodes; return the outcome of each, by its name."""
    names = _names()
    reader = (
        ray.remote(ModelReaderActor)
        .options(
            num_cpus=0,
            max_concurrency=_READS,
            scheduling_strategy=_on(ray.get_runtime_context().get_node_id()),
        )
        .remote(source, manifest)
    )
    jobs = dict[str, RayStagingJob]()
    for node, target in target_by_node.items():
        actor: Handle = (
            ray.remote(StagingActor)
            .options(num_cpus=0, max_concurrency=2, scheduling_strategy=_on(node))
            .remote()
        )
        copy = actor.copy.remote(manifest, source, reader, target)
        jobs[names[node]] = RayStagingJob(names[node], actor, copy)
    outcomes = watch(jobs, stall_s, SystemClock(), say)
    return {name: as_node_outcome(outcome) for name, outcome in outcomes.items()}


def awaited(
    call: Callable[[ProgressMeter], T], what: str, stall_s: float, say: Callable[[str], None]
) -> T:
    """Return the value of a call on this machine, which is abandoned when it stands still."""
    outcome = watch({_AT_SOURCE: ThreadJob(call, what)}, stall_s, SystemClock(), say)[_AT_SOURCE]
    if isinstance(outcome, Stalled):
        fix = "Look at the disk or the network of this machine, and stage again"
        raise SourceStalled(what, str(outcome), fix)
    if isinstance(outcome, OffbeatError):
        raise outcome
    return outcome


def _names() -> dict[str, str]:
    """Return the address of each node by its id, with the id where several share an address."""
    address_by_id = {str(node["NodeID"]): str(node["NodeManagerAddress"]) for node in ray.nodes()}
    nodes_at = Counter(address_by_id.values())
    return {
        node: address if nodes_at[address] == 1 else f"{address}/{node[:6]}"
        for node, address in address_by_id.items()
    }


def _on(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node, soft=False)
