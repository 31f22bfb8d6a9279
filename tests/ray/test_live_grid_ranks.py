"""A language rank and an encoder rank over real actors: one is killed, hangs or fails, in each phase of a step."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import count, product, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import ray

from offbeat.actors.ray_trainer import RayTrainer
from offbeat.config.loss_spec import LossSpec
from offbeat.config.run import RunConfig
from offbeat.config.sections.loss import ClippedPgLossConfig
from offbeat.messages.failures import ActorLost, TrainStepFailed
from offbeat.messages.fences import StepKey
from offbeat.messages.training import StepResult, TrainerState
from offbeat.trainers.spec import TrainerSpec
from tests.ray.test_live_gang import FENCE, chunk_of
from tests.support.faulty_trainer import FaultyTrainerActor
from tests.support.image_text_models import make, picture_groups

LOSS = LossSpec(ClippedPgLossConfig(old_logprobs="policy"))
DEADLINE_S = 20.0
COLLECTIVE_S = 0.7 * DEADLINE_S  # what ranks wait for each other
LANE, ENCODER = 0, 1  # their ranks


class Outcome(NamedTuple):
    """What a step leaves: equal for equal steps, to the bit."""

    loss: float
    grad_norm: float
    digest: str  # of the weights after it


@dataclass
class Bench:
    """A lane, its encoder rank, and the calls of a controller, which make one step after another."""

    trainer: RayTrainer
    ranks: list[Any]

    def __post_init__(self) -> None:
        self._attempts = count(1)
        self.key = StepKey(1, 0, 0)
        self.result: StepResult | None = None
        self.undisturbed: Outcome | None = None
        self.calls: dict[str, Callable[[], Awaitable[object]]] = {
            "begin": self._begin,
            "prepare_logprobs": self._prepare_logprobs,
            "microbatch": self._microbatch,
            "finish": self._finish,
            "publish": lambda: self.trainer.publish_weights(FENCE, 1),
            "checkpoint": lambda: self.trainer.save_checkpoint(FENCE, 1),
        }

    async def up(self) -> TrainerState:
        """Wait for both ranks, and go back to the initial model."""
        async with asyncio.timeout(200):
            while True:
                try:
                    await self.trainer.state(FENCE)
                    return await self.trainer.restore(FENCE, 0)
                except ActorLost:
                    await asyncio.sleep(0.1)  # real processes are starting

    async def until(self, phase: str) -> None:
        """Make the calls of step 1 that come before a phase."""
        for name in takewhile(lambda name: name != phase, self.calls):
            await self.calls[name]()

    async def step(self) -> Outcome:
        """Take step 1 whole: it is applied, and moves the weights."""
        initial = (await self.trainer.state(FENCE)).digest
        await self.until("publish")
        assert self.result is not None
        assert self.result.applied
        assert self.result.loss
        assert self.result.grad_norm > 0
        digest = (await self.trainer.state(FENCE)).digest
        assert digest != initial
        return Outcome(self.result.loss, self.result.grad_norm, digest)

    async def pids(self) -> list[int]:
        identities = [await each.identity.remote(FENCE) for each in self.ranks]
        return [int(incarnation.split("-")[-2]) for incarnation, _ in identities]

    async def _begin(self) -> None:
        self.key = StepKey(1, next(self._attempts), 0)
        groups = picture_groups((1, 0, 2))
        for group in groups:
            del group["policy_logprobs"]
        self._chunk = chunk_of(groups, (0, 1, 2))
        advantages = ((0.5, -0.5, 0.25),) * len(groups)
        self._chunk = msgspec.structs.replace(self._chunk, advantages=advantages)
        await self.trainer.begin_train_step(FENCE, self.key, LOSS)

    async def _prepare_logprobs(self) -> None:
        made = await self.trainer.prepare_logprobs(FENCE, self._chunk, LOSS)
        held = zip(self._chunk.payloads, made.payloads, strict=True)
        payloads = tuple((*old, new) for old, new in held)
        self._chunk = msgspec.structs.replace(self._chunk, payloads=payloads)

    async def _microbatch(self) -> None:
        await self.trainer.train_microbatch(FENCE, self.key.next(), self._chunk)

    async def _finish(self) -> None:
        key = self.key.next().next()
        self.result = await self.trainer.finish_train_step(FENCE, key)


@pytest.fixture(scope="module")
def bench(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One lane and one encoder rank for all tests of this file: each leaves them able to start again."""
    model, run_dir = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("run")
    make("idefics3").save_pretrained(model)
    (model / "tokenizer.json").write_text("{}")
    config = config_of(model)
    cls = ray.remote(FaultyTrainerActor).options(num_cpus=0, max_restarts=-1)
    ranks = [cls.remote(TrainerSpec(config, str(run_dir), rank, 2)) for rank in (0, ENCODER)]
    bench = Bench(RayTrainer(ranks, config.trainer), ranks)

    async def undisturbed() -> Outcome:
        await bench.up()
        return await bench.step()

    bench.undisturbed = asyncio.run(undisturbed())
    yield bench
    for rank in bench.ranks:
        ray.kill(rank)


def config_of(model: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "steps": 10,
            "groups_per_step": 4,
            "model": {"path": str(model), "dtype": "float32"},
            "environment": {"name": "digits", "images": {"max_mib": 1.0}},
            "generator": {"max_model_len": 128},
            "trainer": {
                "encoder": {"data_parallel": 1},
                "step_deadline_s": DEADLINE_S,
                "optimizer": {"learning_rate": 1e-3, "eps": 1.0},
            },
        }
    )


PHASES = ("prepare_logprobs", "microbatch", "finish", "publish", "checkpoint")
SHORT = ("microbatch", ENCODER, signal.SIGSTOP)  # the other cases take part in long runs only
CASES = [
    pytest.param(
        *case,
        id=f"{case[0]}-{'lane' if case[1] == LANE else 'encoder'}-{case[2].name}",
        marks=[] if case == SHORT else pytest.mark.long,
    )
    for case in product(PHASES, (LANE, ENCODER), (signal.SIGKILL, signal.SIGSTOP))
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("phase", "rank", "sent"), CASES)
def test_a_rank_that_is_killed_or_hangs_is_named_and_new_ranks_take_the_same_step(
    bench: Bench, phase: str, rank: int, sent: signal.Signals
) -> None:
    """The call fails within its deadline; loss, gradient norm and weights are the undisturbed step's."""

    async def story() -> None:
        await bench.up()
        before = await bench.pids()
        await bench.until(phase)
        os.kill(before[rank], sent)
        with pytest.raises(ActorLost) as lost:
            async with asyncio.timeout(DEADLINE_S):
                await bench.calls[phase]()
        assert lost.value.actor == f"trainer rank {rank}"
        await bench.trainer.restart()
        assert (await bench.up()).version == 0
        assert not set(before) & set(await bench.pids())
        assert await bench.step() == bench.undisturbed

    asyncio.run(story())


@pytest.mark.timeout(600)
def test_an_error_of_the_tower_is_raised_at_once_and_costs_no_rank(bench: Bench) -> None:
    """In both calls that run it; the lane ends its call without waiting for its timeout."""

    async def story() -> None:
        await bench.up()
        pids = await bench.pids()
        await bench.until("microbatch")
        await bench.ranks[ENCODER].fail_in_forward.remote(FENCE)
        for phase in ("microbatch", "prepare_logprobs"):
            with pytest.raises(TrainStepFailed, match=r"rank 1.*planted in the first layer"):
                async with asyncio.timeout(COLLECTIVE_S):
                    await bench.calls[phase]()
            await bench.trainer.abort_train_step(FENCE, bench.key)
            await bench.calls["begin"]()
        assert await bench.pids() == pids
        await bench.trainer.restart()

    asyncio.run(story())
