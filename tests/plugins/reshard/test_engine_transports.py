"""Engine servers that load the releases of one trainer rank, over each transport."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from offbeat.config.run import RunConfig
from offbeat.generators.embedded.server import EmbeddedEngineServer
from offbeat.generators.spec import EngineSpec
from offbeat.messages.failures import ReleaseLost, WeightSyncFailed
from offbeat.trainers.ranks.peers import SingleRank
from offbeat.trainers.senders import make_sender
from offbeat.trainers.spec import TrainerSpec
from offbeat.weight_sync.chunks import iterate_weights
from offbeat.weight_sync.transport import Sender
from tests.support.loading import FENCE, load, released
from tests.support.plain_modules import ModuleSource
from tests.support.recipes import make_config

pytestmark = pytest.mark.real_clock

TINY = Path(__file__).parents[3] / "models" / "tiny-addition"


def config(**sync: Any) -> RunConfig:
    return make_config(TINY, sync=sync)


def sender(model: nn.Module, run_dir: Path, **sync: Any) -> Sender:
    spec = TrainerSpec(config(**sync), str(run_dir))
    source = ModuleSource(model, chunk_bytes=200_000)
    return make_sender(spec, source, lambda: "127.0.0.1", "incarnation-1", SingleRank())


def engine(run_dir: Path, name: str = "generator-0") -> EmbeddedEngineServer:
    run = config()
    spec = EngineSpec(name, run.model, run.generator, run.stub, 0, str(run_dir), keeps_base=True)
    return EmbeddedEngineServer(spec)


@pytest.fixture
def model() -> nn.Module:
    loaded: nn.Module = AutoModelForCausalLM.from_pretrained(
        TINY, local_files_only=True, dtype=torch.float32
    )
    return loaded


@pytest.fixture
def over_tcp(model: nn.Module, tmp_path: Path) -> Iterator[Sender]:
    made = sender(model, tmp_path, transport="reshard")
    yield made
    made.close()


def content(module: nn.Module) -> dict[str, bytes]:
    """Bytes of every weight."""

    def raw(tensor: Tensor) -> bytes:
        return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()

    return {name: raw(each) for name, each in iterate_weights(module)}


def train(model: nn.Module) -> None:
    """Change some values of every weight."""
    with torch.no_grad():
        for _, each in iterate_weights(model):
            each.view(-1)[::100] *= 1.0625


def test_two_engines_serve_the_same_bytes_over_reshard_as_over_the_object_store(
    model: nn.Module, tmp_path: Path
) -> None:
    """One rank; a full release, and one by what it changes."""
    kinds = ("object_store", "reshard")
    senders = {
        kind: sender(model, tmp_path, transport=kind, delta=True, chunk_mib=0.2) for kind in kinds
    }
    engines = {
        kind: [engine(tmp_path, f"{kind}-{number}") for number in range(2)] for kind in kinds
    }

    async def main() -> None:
        for version in (1, 2):
            train(model)
            digests = set[str]()
            for kind in kinds:
                release = released(version, senders[kind].publish(version))
                assert (release.delta is None) == (version == 1)
                for each in engines[kind]:
                    ack = await load(each, version, release)
                    assert (ack.version, ack.digest) == (version, release.digest)
                    digests.add(ack.digest)
            served = [content(each._module) for kind in kinds for each in engines[kind]]  # noqa: SLF001
            assert served == [content(model)] * 4
            assert len(digests) == 1
        for each in (*engines["object_store"], *engines["reshard"]):
            await each.close()

    try:
        asyncio.run(main())
    finally:
        for each in senders.values():
            each.close()


async def test_an_engine_reports_a_lost_release_when_the_sender_is_gone_and_takes_the_next(
    model: nn.Module, over_tcp: Sender, tmp_path: Path
) -> None:
    server = engine(tmp_path)
    release = released(3, over_tcp.publish(3))
    ack = await load(server, 1, release)
    assert (ack.epoch, ack.version, ack.digest) == (1, 3, release.digest)
    over_tcp.close()
    with pytest.raises(ReleaseLost, match="is gone"):
        await load(server, 2, release)
    state = await server.state(FENCE)
    assert (state.version, state.digest) == (3, release.digest)
    with pytest.raises(WeightSyncFailed, match="a newer transfer was begun: epoch 2"):
        await load(server, 2, release)
    again = await load(server, 3, released(4, sender(model, tmp_path).publish(4)))
    assert again.version == 4, "one transport heals what another one broke"
    await server.close()


async def test_a_call_that_is_cancelled_leaves_the_engine_what_it_was(
    over_tcp: Sender, tmp_path: Path
) -> None:
    server = engine(tmp_path)
    call = asyncio.ensure_future(load(server, 1, released(3, over_tcp.publish(3))))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await server.state(FENCE)).version is None
    await server.close()
