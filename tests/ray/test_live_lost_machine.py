"""A machine dies with the columns and weights it held: who needs them says what is lost, and lives."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

from offbeat.actors.engine_actor import StubEngineActor
from offbeat.actors.ray_ports import PayloadHandle, RayGenerator, RaySpool
from offbeat.generators.spec import EngineSpec
from offbeat.messages.failures import PayloadLost, ReleaseLost
from offbeat.messages.fences import StepKey
from offbeat.messages.training import Chunk
from offbeat.messages.weights import WeightRelease
from offbeat.weight_sync.manifest import Manifest
from tests.ray.test_live_gang import CONFIG, FENCE, LOSS, Bench, bench_of, columns

SETTINGS = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
}
# With a fixed port, Ray tests it and leaves the socket open when another cluster has it.
NO_DASHBOARD = {"include_dashboard": False, "dashboard_port": None}
HERE, OTHER = {"here": 0.01}, {"other": 0.01}
PADDING = 400_000  # bytes: too large to travel inside a reply


@ray.remote(num_cpus=0)
class Maker:
    """Makes columns, and weights, on the machine it lives on."""

    @ray.method(num_returns=2)
    def columns(self, *prompt_indices: int) -> tuple[int, list[dict[str, Any]]]:
        return 0, [
            {**columns(each), "padding": np.zeros(PADDING, np.uint8)} for each in prompt_indices
        ]

    @ray.method(num_returns=2)
    def weights(self) -> tuple[int, bytes]:
        return 0, bytes(PADDING)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two raylets: the one we are on, and one that can die."""
    head: dict[str, Any] = {"num_cpus": 1, "resources": {"here": 1}, **NO_DASHBOARD}
    both = Cluster(initialize_head=True, head_node_args=head | {"_system_config": SETTINGS})
    ray.init(address=both.address, log_to_driver=False)
    yield both
    ray.shutdown()
    both.shutdown()


class Columns:
    """Groups 0 and 1 in an object on this machine, 2 and 3 in one on the other."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.machine = cluster.add_node(num_cpus=1, resources={"other": 1})
        self.other: Any = Maker.options(resources=OTHER).remote()
        here: Any = Maker.options(resources=HERE).remote()
        made = [here.columns.remote(0, 1), self.other.columns.remote(2, 3)]
        ray.get([done for done, _ in made])
        self.payloads = {
            prompt_index: (PayloadHandle(made[prompt_index // 2][1], prompt_index % 2),)
            for prompt_index in range(4)
        }

    def die(self) -> None:
        self.cluster.remove_node(self.machine, allow_graceful=False)

    def chunk(self, *prompt_indices: int) -> Chunk:
        return Chunk(
            prompt_indices,
            tuple(self.payloads[each] for each in prompt_indices),
            ((0.5, -0.5),) * len(prompt_indices),
            0,
            tuple(6 + each for each in prompt_indices),
        )


async def trained(bench: Bench, attempt: int, chunk: Chunk) -> bool:
    """One step; aborted where it fails."""
    key = StepKey(1, attempt, 0)
    await bench.trainer.begin_train_step(FENCE, key, LOSS)
    try:
        made = await bench.trainer.prepare_logprobs(FENCE, chunk, LOSS)
        whole = tuple((*old, new) for old, new in zip(chunk.payloads, made.payloads, strict=True))
        chunk = Chunk(chunk.prompt_indices, whole, chunk.advantages, 0, chunk.group_tokens)
        await bench.trainer.train_microbatch(FENCE, key.next(), chunk)
        return (await bench.trainer.finish_train_step(FENCE, key.next().next())).applied
    except PayloadLost:
        await bench.trainer.abort_train_step(FENCE, key)
        raise


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_columns_that_died_with_a_machine_are_named_and_the_ranks_go_on(
    cluster: Cluster, tmp_path: Path, ranks: int
) -> None:
    async def story() -> None:
        bench = bench_of(ranks, tmp_path, resources=HERE)
        await bench.up()
        lost_columns = Columns(cluster)
        incarnations = [await bench.incarnation(rank) for rank in range(ranks)]
        lost_columns.die()
        with pytest.raises(PayloadLost) as lost:
            async with asyncio.timeout(240):
                await trained(bench, 1, lost_columns.chunk(0, 1, 2, 3))
        assert lost.value.prompt_indices == (2, 3)
        assert "the machine that held it died" in str(lost.value)
        assert await RaySpool(tmp_path).lost(lost_columns.payloads) == {2, 3}
        assert await trained(bench, 2, lost_columns.chunk(0, 1)), "the ranks are well"
        assert [await bench.incarnation(rank) for rank in range(ranks)] == incarnations

    asyncio.run(story())


def test_weights_that_died_with_a_machine_are_not_the_engines_fault(
    cluster: Cluster, tmp_path: Path
) -> None:
    async def story() -> None:
        machine = cluster.add_node(num_cpus=1, resources={"other": 1})
        maker: Any = Maker.options(resources=OTHER).remote()
        done, weights = maker.weights.remote()
        spec = EngineSpec(
            "generator-0", CONFIG.model, CONFIG.generator, CONFIG.stub, 0, str(tmp_path)
        )
        handle = ray.remote(StubEngineActor).options(num_cpus=0, resources=HERE).remote(spec)
        engine = RayGenerator("generator-0", handle)
        await done
        before = await engine.state(FENCE)
        cluster.remove_node(machine, allow_graceful=False)
        release = WeightRelease(1, "digest", Manifest((), (), ""), (weights,), PADDING)
        with pytest.raises(ReleaseLost, match="version 1 were lost before generator-0"):
            async with asyncio.timeout(240):
                await engine.load_weights(FENCE, 1, release)
        assert (await engine.state(FENCE)).incarnation == before.incarnation

    asyncio.run(story())
