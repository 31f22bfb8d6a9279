"""ARCHITECTURE.md names every file that hands one weight version on, as executed code shows."""

import asyncio
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import xxhash
from following import Follower
from in_process import InProcessGenerator, InProcessRollouts, InProcessTrainer, InProcessWorker

from offbeat.actors.engine_actor import EmbeddedEngineActor
from offbeat.actors.trainer_actor import TorchTrainerActor
from offbeat.environments.prompts import ArithmeticPrompts
from offbeat.generators.incoming import IncomingRelease
from offbeat.generators.spec import EngineSpec
from offbeat.messages.weights import WeightRelease, WeightsAck
from offbeat.rollouts.worker import EnvironmentSpec
from offbeat.trainers.ranks.peers import SingleRank
from offbeat.trainers.spec import TrainerSpec
from offbeat.trainers.torch.torch_trainer import make_torch_rank
from offbeat.weight_sync.chunks import GatheredSource
from offbeat.weight_sync.manifest import Manifest, release_digest
from tests.support.architecture import traced
from tests.support.world import World

ROOMS: Final = ("controller", "weight_sync", "trainers", "generators")
PASSING: Final = {
    "controller/pending_waits.py": "the deadline of any call",
    "weight_sync/delta_plugin.py": "packs a release without a delta",
    "weight_sync/transport.py": "puts the handles of a release behind its manifest",
    "weight_sync/manifest.py": "returns a digest to the file that asked",
    "generators/incoming.py": "returns the chunks that came with the call",
}
"""Files through which the weights pass on the way between two that the architecture lists, and why
a reader who follows them need not open these."""

MODEL: Final = Path(__file__).parents[2] / "models" / "tiny-addition"
RUN: Final[dict[str, Any]] = {
    "steps": 1,
    "model": {"path": str(MODEL)},
    "environment": {"name": "arithmetic"},
    "generator": {
        "backend": "embedded",
        "max_model_len": 32,
        "sampling": {"max_new_tokens": 4},
    },
    "trainer": {"backend": "torch", "device": "cpu"},
}


class FirstVersion:
    """Recognises the initial weights: a chunk, a digest, a manifest, a release or an ack of them."""

    def __init__(self, spec: TrainerSpec) -> None:
        _, source = make_torch_rank(spec, SingleRank())
        assert isinstance(source, GatheredSource)
        packed = list(source.chunks())
        digests = [digest for _, digest in packed]
        self.sizes = {chunk.nbytes for chunk, _ in packed}
        self.digests = {*digests, release_digest(source.manifest, digests)}

    def __call__(self, name: str, value: Any) -> bool:
        match value:
            case str():
                return value in self.digests
            case np.ndarray():
                is_chunk = value.dtype == np.uint8 and value.nbytes in self.sizes
                return is_chunk and xxhash.xxh3_128_hexdigest(value.data) in self.digests
            case Manifest():
                return not self.digests.isdisjoint(value.chunk_digests)
            case WeightRelease() | WeightsAck():
                return value.digest in self.digests
            case IncomingRelease():
                return value.release.digest in self.digests
            case _:
                return False


@pytest.fixture(scope="module")
def handovers(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str]]:
    folder = str(tmp_path_factory.mktemp("run"))
    world: Any = World(RUN, engines=1)
    world.prompts = ArithmeticPrompts(0, 9, seed=0)
    config = world.config
    trainer = TrainerSpec(config, folder)
    engine = EngineSpec(
        name="generator-0",
        model=config.model,
        generator=config.generator,
        stub=config.stub,
        seed=0,
        run_dir=folder,
    )
    follower = Follower(FirstVersion(trainer), returned=True)

    async def main() -> None:
        made = InProcessGenerator(engine.name, lambda: EmbeddedEngineActor(engine))
        world.generators = {engine.name: made}
        worker = EnvironmentSpec("environment-0", config, folder, folder, {})
        world.rollouts = InProcessRollouts(InProcessWorker(worker, world.generators))
        world.trainer = InProcessTrainer(lambda: TorchTrainerActor(trainer))
        with follower.following():
            await world.go()
        assert world.built.state.ledger.trainer_version == RUN["steps"]

    asyncio.run(main())
    return follower.handovers


def test_each_file_that_hands_the_weights_on_is_in_the_architecture(
    handovers: set[tuple[str, str]],
) -> None:
    listed = {file for file, _ in traced("One weight version")}
    handing_on = {giver for giver, _ in handovers if giver.split("/")[0] in ROOMS}
    assert sorted(handing_on - listed - PASSING.keys()) == [], (
        "add a row to ARCHITECTURE.md, or take the file out"
    )


def test_the_weights_are_followed_from_the_trainer_to_the_engine_that_serves_them(
    handovers: set[tuple[str, str]],
) -> None:
    assert {*PASSING} <= {giver for giver, _ in handovers}, "none is listed in vain"
    for giver, taker in (
        ("weight_sync/chunks.py", "weight_sync/transport.py"),
        ("weight_sync/transport.py", "weight_sync/delta_plugin.py"),
        ("weight_sync/delta_plugin.py", "weight_sync/object_store.py"),
        ("weight_sync/object_store.py", "trainers/rank.py"),
        ("generators/engine_server.py", "generators/module_server.py"),
        ("weight_sync/receiver.py", "weight_sync/transaction.py"),
        ("controller/syncing.py", "controller/fleet.py"),
    ):
        assert (giver, taker) in handovers
