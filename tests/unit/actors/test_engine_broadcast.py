"""An engine actor that takes its weights from a broadcast."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from offbeat.actors.embedded_engine_actor import EmbeddedEngineActor
from offbeat.config.run import RunConfig
from offbeat.config.sections.sync import GlooSyncConfig
from offbeat.generators.spec import EngineSpec
from offbeat.messages.failures import ReleaseLost, WeightSyncFailed
from offbeat.messages.fences import Fence
from offbeat.weight_sync.source import ModuleSource
from offbeat.weight_sync.transport import Sender
from offbeat.weight_sync.transports.choose import make_sender
from offbeat.weight_sync.transports.object_store import ObjectStoreSender

TINY = Path(__file__).parents[3] / "models" / "tiny-addition"
CONFIG = RunConfig.model_validate({"steps": 1, "model": {"path": str(TINY)}})
FENCE = Fence("run", 1)
NAME = "generator-0"


@pytest.fixture
def source() -> ModuleSource:
    model = AutoModelForCausalLM.from_pretrained(TINY, local_files_only=True, dtype=torch.float32)
    return ModuleSource(model, chunk_bytes=200_000)


@pytest.fixture
def sender(source: ModuleSource) -> Iterator[Sender]:
    made = make_sender(GlooSyncConfig(), source, lambda: "127.0.0.1", "incarnation-1")
    yield made
    made.close()


def engine(run_dir: Path) -> EmbeddedEngineActor:
    return EmbeddedEngineActor(
        EngineSpec(
            name=NAME,
            model=CONFIG.model,
            generator=CONFIG.generator,
            stub=CONFIG.stub,
            seed=0,
            run_dir=str(run_dir),
        )
    )


def test_it_acks_what_it_took_and_reports_a_lost_release_when_the_sender_is_gone(
    sender: Sender, source: ModuleSource, tmp_path: Path
) -> None:
    async def main() -> None:
        actor = engine(tmp_path)
        manifest, digest, (route,), *_ = sender.publish(3)
        ack = await actor.receive_weights(FENCE, 1, 3, digest, manifest, route, (NAME,))
        assert (ack.epoch, ack.version, ack.digest) == (1, 3, digest)
        sender.close()
        with pytest.raises(ReleaseLost, match="is gone"):
            await actor.receive_weights(FENCE, 2, 4, digest, manifest, route, (NAME,))
        state = await actor.state(FENCE)
        assert (state.version, state.digest) == (3, digest)
        with pytest.raises(WeightSyncFailed, match="a newer transfer was begun: epoch 2"):
            await actor.receive_weights(FENCE, 2, 4, digest, manifest, route, (NAME,))
        whole = ObjectStoreSender(source).publish(4)
        again = await actor.load_weights(FENCE, 3, 4, whole.digest, whole.manifest, *whole.handles)
        assert again.version == 4, "one transport heals what another one broke"
        await actor.close()

    asyncio.run(main())


def test_a_call_that_is_cancelled_leaves_the_engine_what_it_was(
    sender: Sender, tmp_path: Path
) -> None:
    async def main() -> None:
        actor = engine(tmp_path)
        manifest, digest, (route,), *_ = sender.publish(3)
        waits_for_another = (NAME, "generator-1")
        call = asyncio.ensure_future(
            actor.receive_weights(FENCE, 1, 3, digest, manifest, route, waits_for_another)
        )
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await actor.state(FENCE)).version is None
        await actor.close()

    asyncio.run(main())
