"""Two ranks over real actors: what one of them suffers, all get over."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import ray

from offbeat.actors.ray_ports import PayloadHandle
from offbeat.actors.ray_trainer import RayTrainer
from offbeat.config.loss_spec import LossSpec
from offbeat.config.run import RunConfig
from offbeat.config.sections.loss import ClippedPgLossConfig
from offbeat.messages.failures import ActorLost, UnfitGroup
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.training import Chunk, StepResult, TrainerState
from offbeat.trainers.spec import TrainerSpec
from tests.support.faulty_trainer import FaultyTrainerActor
from tests.support.starting import ROOT

FENCE, LOSS = Fence("run", 1), LossSpec(ClippedPgLossConfig(old_logprobs="policy"))
TWICE_TWO = LossSpec(ClippedPgLossConfig(old_logprobs="generation"), minibatches=2, epochs=2)
TINY = ROOT / "models" / "tiny-addition"
DEADLINE_S = 12.0
CONFIG = RunConfig.model_validate(
    {
        "steps": 10,
        "groups_per_step": 4,
        "model": {"path": str(TINY), "dtype": "float64"},
        "trainer": {
            "data_parallel": 2,
            "step_deadline_s": DEADLINE_S,
            "optimizer": {"learning_rate": 1e-3, "eps": 1.0},
        },
    }
)


def columns(prompt_index: int) -> dict[str, Any]:
    dice = np.random.default_rng(prompt_index)
    tokens = 3 + prompt_index
    return {
        "prompt_ids": dice.integers(3, 60, 3, dtype=np.int32),
        "response_ids": dice.integers(3, 60, tokens, dtype=np.int32),
        "response_offsets": np.array([0, 2, tokens], np.int64),
        "loss_mask": np.full(tokens, fill_value=True),
        "generation_logprobs": -1 - dice.random(tokens, np.float32),
        "weight_versions": np.zeros(tokens, np.int32),
    }


@dataclass
class Bench:
    """A trainer of some ranks, and what a controller does with it."""

    trainer: RayTrainer
    ranks: list[Any]

    def __post_init__(self) -> None:
        self._attempts = count(1)

    async def up(self) -> TrainerState:
        async with asyncio.timeout(90):
            while True:
                try:
                    return await self.trainer.state(FENCE)
                except ActorLost:
                    await asyncio.sleep(0.1)  # real processes are starting

    async def step(
        self,
        number: int,
        *prompt_indices: int,
        spoil: Callable[[dict[str, Any]], object] = lambda columns: None,
        begun: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """One step in one chunk; ``spoil`` changes the columns of the first group."""
        key = StepKey(number, next(self._attempts), 0)
        groups = [columns(each) for each in prompt_indices]
        spoil(groups[0])
        chunk = chunk_of(groups, prompt_indices)
        await self.trainer.begin_train_step(FENCE, key, LOSS)
        begun()
        try:
            made = await self.trainer.prepare_logprobs(FENCE, chunk, LOSS)
            payloads = tuple(
                (*held, new) for held, new in zip(chunk.payloads, made.payloads, strict=True)
            )
            chunk = Chunk(chunk.prompt_indices, payloads, chunk.advantages, 0, chunk.group_tokens)
            await self.trainer.train_microbatch(FENCE, key.next(), chunk)
            return await self.trainer.finish_train_step(FENCE, key.next().next())
        except UnfitGroup:
            await self.trainer.abort_train_step(FENCE, key)
            raise

    async def minibatch_step(self, number: int, *, dies: bool = False) -> StepResult:
        """One step of two minibatches, twice; rank 1 may die in the second one."""
        key, held = StepKey(number, next(self._attempts), 0), (0, 1, 2, 3)
        plain = chunk_of([columns(each) for each in held], held)
        chunk = msgspec.structs.replace(plain, minibatches=(0, 1, 0, 1))
        await self.trainer.begin_train_step(FENCE, key, TWICE_TWO)
        await self.trainer.train_microbatch(FENCE, key.next(), chunk)
        if dies:
            await self.ranks[1].die_in_forward.remote(FENCE, 1)
        return await self.trainer.finish_train_step(FENCE, key.next().next())

    async def incarnation(self, rank: int) -> str:
        """A name for the process of a rank."""
        incarnation, _ = await self.ranks[rank].identity.remote(FENCE)
        return incarnation

    async def pid(self, rank: int) -> int:
        return int((await self.incarnation(rank)).split("-")[-2])


def chunk_of(groups: list[dict[str, Any]], prompt_indices: tuple[int, ...]) -> Chunk:
    ref: Any = ray.put(groups)
    return Chunk(
        prompt_indices,
        tuple((PayloadHandle(ref, index),) for index in range(len(groups))),
        ((0.5, -0.5),) * len(groups),
        0,
        tuple(6 + prompt_index for prompt_index in prompt_indices),
    )


def bench_of(ranks: int, run_dir: Path, resources: dict[str, float] | None = None) -> Bench:
    """Ranks on a machine that has these resources."""
    cls = ray.remote(FaultyTrainerActor).options(
        num_cpus=0, max_restarts=-1, resources=resources or {}
    )
    handles = [cls.remote(TrainerSpec(CONFIG, str(run_dir), rank, ranks)) for rank in range(ranks)]
    return Bench(RayTrainer(handles, CONFIG.trainer), handles)


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Two ranks for all tests of this file: each leaves them able to start again."""
    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=1)
    yield bench_of(2, tmp_path_factory.mktemp("two"))
    ray.shutdown()


def test_two_ranks_take_the_steps_of_one(gang: Bench, tmp_path: Path) -> None:
    async def story() -> None:
        one = bench_of(1, tmp_path)
        states = [await each.up() for each in (one, gang)]
        assert [each.ranks for each in states] == [1, 2]
        assert states[0].digest == states[1].digest
        releases = [await each.trainer.publish_weights(FENCE, 0) for each in (one, gang)]
        assert releases[0].digest == releases[1].digest
        for number, prompt_indices in enumerate([(0, 1, 2, 3, 4), (5,)], start=1):
            results = [await each.step(number, *prompt_indices) for each in (one, gang)]
            assert all(each.applied for each in results)
            assert results[1].tokens == results[0].tokens
            assert results[1].loss == pytest.approx(results[0].loss, rel=1e-6)
            assert results[1].grad_norm == pytest.approx(results[0].grad_norm, rel=1e-6)
        kept = await gang.trainer.save_checkpoint(FENCE, 2)
        await gang.step(3, 6, 7)
        back = await gang.trainer.restore(FENCE, 2)
        assert (back.version, back.digest) == (2, kept.digest)
        await one.trainer.restart()

    asyncio.run(story())


def without(column: str) -> Callable[[dict[str, Any]], object]:
    return lambda columns: columns.pop(column)


def with_an_unknown_token(columns: dict[str, Any]) -> None:
    columns["response_ids"][0] = 10_000


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (without("response_ids"), "'response_ids' is missing"),
        (without("loss_mask"), "'loss_mask' is missing"),
        (with_an_unknown_token, "10000 at index 0"),
    ],
)
def test_a_group_that_one_rank_cannot_read_is_named_and_the_step_aborted_on_all(
    gang: Bench, spoil: Callable[[dict[str, Any]], object], named: str
) -> None:
    """When logprobs are prepared, or when it is trained."""

    async def story() -> None:
        await gang.up()
        await gang.trainer.restore(FENCE, 0)
        with pytest.raises(UnfitGroup, match=named):
            await gang.step(1, 0, 1, 2, spoil=spoil)
        assert (await gang.step(1, 0, 1, 2)).applied

    asyncio.run(story())


def test_a_rank_that_raises_while_the_others_compute_costs_all_ranks(gang: Bench) -> None:
    """One rank fails in the midst of its forward pass; the other waits for it in a collective."""

    async def story() -> None:
        await gang.up()
        await gang.trainer.restore(FENCE, 0)
        await gang.ranks[1].fail_in_forward.remote(FENCE)
        with pytest.raises(ActorLost, match="planted in the first layer"):
            async with asyncio.timeout(DEADLINE_S):
                await gang.step(1, 0, 1, 2)
        await gang.trainer.restart()
        await gang.up()
        await gang.trainer.restore(FENCE, 0)
        assert (await gang.step(1, 0, 1, 2)).applied

    asyncio.run(story())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_or_hangs_costs_all_ranks_and_they_come_back(
    gang: Bench, rank: int
) -> None:
    """One that hangs is found out before the deadline of a step is over."""

    async def story() -> None:
        await gang.up()
        await gang.trainer.restore(FENCE, 0)
        first = await gang.step(1, 0, 1, 2)
        for number in (signal.SIGKILL, signal.SIGSTOP):
            before = [await gang.pid(each) for each in (0, 1)]
            strike = partial(os.kill, before[rank], number)
            with pytest.raises(ActorLost):
                async with asyncio.timeout(DEADLINE_S):
                    await gang.step(2, 3, 4, begun=strike)
            await gang.trainer.restart()
            assert (await gang.up()).version == 0
            after = [await gang.pid(each) for each in (0, 1)]
            assert not set(before) & set(after)
            await gang.trainer.restore(FENCE, 0)
            assert numbers(await gang.step(1, 0, 1, 2)) == numbers(first)

    asyncio.run(story())


@pytest.mark.long
def test_a_rank_that_is_killed_between_two_minibatches_leaves_nothing_of_the_step(
    gang: Bench,
) -> None:
    """All minibatches are trained in ``finish``: the first was applied when the rank dies in the second."""

    async def story() -> None:
        await gang.up()
        await gang.trainer.restore(FENCE, 0)
        first = await gang.minibatch_step(1)
        assert first.metrics["train/optimizer_steps"] == 4
        await gang.trainer.restore(FENCE, 0)
        with pytest.raises(ActorLost):
            async with asyncio.timeout(DEADLINE_S * TWICE_TWO.optimizer_steps):
                await gang.minibatch_step(1, dies=True)
        await gang.trainer.restart()
        assert (await gang.up()).version == 0
        await gang.trainer.restore(FENCE, 0)
        assert numbers(await gang.minibatch_step(1)) == numbers(first)

    asyncio.run(story())


def test_a_rank_that_hangs_before_a_step_is_found_out_by_those_that_go_on(gang: Bench) -> None:
    """``begin`` brings ranks nowhere together; but nobody waits for its answer before the next call."""

    async def story() -> None:
        await gang.up()
        await gang.trainer.restore(FENCE, 0)
        os.kill(await gang.pid(1), signal.SIGSTOP)
        key, chunk = StepKey(1, 10_000, 0), chunk_of([columns(each) for each in (0, 1)], (0, 1))
        begin = asyncio.create_task(gang.trainer.begin_train_step(FENCE, key, LossSpec()))
        microbatch = asyncio.create_task(gang.trainer.train_microbatch(FENCE, key.next(), chunk))
        with pytest.raises(ActorLost, match=r"rank 1.*microbatch"):
            async with asyncio.timeout(DEADLINE_S):
                await microbatch
        begin.cancel()
        await gang.trainer.restart()
        assert (await gang.up()).version == 0

    asyncio.run(story())


def numbers(result: StepResult) -> tuple[object, ...]:
    """What a step computed, without the memory and the CPU time that it took."""
    costs = ("memory/", "cpu/")
    metrics = {name: each for name, each in result.metrics.items() if not name.startswith(costs)}
    assert len(metrics) < len(result.metrics)
    return result.loss, result.grad_norm, metrics
