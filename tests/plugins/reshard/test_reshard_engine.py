"""An engine server that fetches its weights from the ranks that hold them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from reshard_bench import ReshardBench
from structlog.testing import capture_logs
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from offbeat.generators.embedded.server import EmbeddedEngineServer
from offbeat.generators.engine_server import LoadOutcome
from offbeat.generators.incoming import IncomingRelease
from offbeat.generators.spec import EngineSpec
from offbeat.messages.failures import ReleaseLost
from offbeat.plugins.verify_weights.legs import compare_served
from offbeat.weight_sync.chunks import iterate_weights
from offbeat.weight_sync.served import ServedWeights
from tests.support.loading import load, released
from tests.support.recipes import make_config

pytestmark = pytest.mark.real_clock

TINY = Path(__file__).parents[3] / "models" / "tiny-addition"
CONFIG = make_config(TINY)


def engine(
    run_dir: Path, kind: type[EmbeddedEngineServer] = EmbeddedEngineServer
) -> EmbeddedEngineServer:
    return kind(
        EngineSpec(
            name="generator-0",
            model=CONFIG.model,
            generator=CONFIG.generator,
            stub=CONFIG.stub,
            seed=0,
            run_dir=str(run_dir),
        )
    )


async def test_it_fetches_regions_from_every_rank_and_an_engine_without_them_makes_whole_tensors(
    tmp_path: Path,
) -> None:
    class WholeTensors(EmbeddedEngineServer):
        async def _load_release(self, incoming: IncomingRelease) -> LoadOutcome:
            chunks = await incoming.bring_whole()
            whole = IncomingRelease(incoming.epoch, incoming.release, chunks, self._fetcher)
            return await super()._load_release(whole)

    model = AutoModelForCausalLM.from_pretrained(TINY, local_files_only=True, dtype=torch.float32)
    bench = ReshardBench(2, models=[model] * 2, bucket_bytes=100_000)

    release = released(3, bench.publish(3))
    for epoch, kind in enumerate((EmbeddedEngineServer, WholeTensors), start=1):
        server = engine(tmp_path, kind)
        with capture_logs() as log:
            ack = await load(server, epoch, release)
        said = [each for each in log if each["event"] == "weights.whole_tensors"]
        loads_regions = kind is EmbeddedEngineServer
        assert len(said) == (0 if loads_regions else 1)
        assert all("takes whole tensors" in each["reason"] for each in said)
        assert (ack.epoch, ack.version, ack.digest) == (epoch, 3, release.digest)
        about = await server.served_weights()
        assert about.manifest is not None
        assert bool(about.manifest.pieces) == loads_regions
        assert all(each.is_equal for each in compare_served(about, lambda _: saved(model)))
        served = dict(iterate_weights(server._module))  # noqa: SLF001
        for name, each in iterate_weights(model):
            assert torch.equal(served[name], each)
        with torch.no_grad():
            for _, each in iterate_weights(model):
                each.mul_(2)
        release = released(3, bench.publish(3))
        await server.close()
    bench.close()
    with pytest.raises(ReleaseLost, match=r"is gone: .* no other rank holds bucket"):
        await load(engine(tmp_path), 9, release)


def test_the_leg_and_the_region_of_a_tensor_that_differ_are_named_in_its_own_coordinates(
    tmp_path: Path,
) -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY, local_files_only=True, dtype=torch.float32)
    bench, name = ReshardBench(2, models=[model] * 2, bucket_bytes=100_000), "model.norm.weight"
    rows = model.get_parameter(name).shape[0]

    async def main() -> tuple[ServedWeights, ServedWeights]:
        server = engine(tmp_path)
        await load(server, 1, released(3, bench.publish(3)))
        as_sent = await server.served_weights()
        with torch.no_grad():
            server._module.get_parameter(name)[rows - 1] += 1  # noqa: SLF001
        torn = await server.served_weights()
        await server.close()
        bench.close()
        return as_sent, torn

    as_sent, torn = asyncio.run(main())
    wire, loaded = compare_served(torn, lambda _: saved(model))
    assert wire.is_equal
    second_rank = f"[{rows // 2}:{rows}]"
    assert loaded.difference is not None
    assert loaded.difference[:2] == (name, second_rank)
    with torch.no_grad():
        model.get_parameter(name)[0] += 1
    wire, loaded = compare_served(as_sent, lambda _: saved(model))
    assert loaded.is_equal
    assert wire.difference is not None
    assert wire.difference[:2] == (name, f"[0:{rows // 2}]")
    lacking, _ = compare_served(as_sent, lambda _: (e for e in saved(model) if e[0] != name))
    assert lacking.difference is not None
    assert lacking.difference.tensor.startswith(name)
    assert "no weight of the checkpoint" in lacking.difference.detail


def saved(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights of a checkpoint, in another order than those of the release."""
    yield from sorted(iterate_weights(model), reverse=True)
