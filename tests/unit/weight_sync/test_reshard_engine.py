"""An engine actor that fetches its weights from the ranks that hold them."""

import asyncio
from pathlib import Path

import pytest
import torch
from reshard_bench import ReshardBench
from transformers import AutoModelForCausalLM

from offbeat.actors.embedded_engine_actor import EmbeddedEngineActor
from offbeat.config.run import RunConfig
from offbeat.generators.spec import EngineSpec
from offbeat.messages.failures import WeightSyncFailed
from offbeat.messages.fences import Fence
from offbeat.weight_sync.source import named_weights

TINY = Path(__file__).parents[3] / "models" / "tiny-addition"
CONFIG = RunConfig.model_validate({"steps": 1, "model": {"path": str(TINY)}})
FENCE = Fence("run", 1)


def engine(
    run_dir: Path, kind: type[EmbeddedEngineActor] = EmbeddedEngineActor
) -> EmbeddedEngineActor:
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


def test_it_fetches_regions_from_every_rank_and_an_engine_without_them_makes_whole_tensors(
    tmp_path: Path,
) -> None:
    class WholeTensors(EmbeddedEngineActor):
        takes_regions = False

    model = AutoModelForCausalLM.from_pretrained(TINY, local_files_only=True, dtype=torch.float32)
    bench = ReshardBench(2, models=[model] * 2, bucket_bytes=100_000)

    async def main() -> None:
        manifest, digest, (route,), *_ = bench.publish(3)
        for epoch, kind in enumerate((EmbeddedEngineActor, WholeTensors), start=1):
            actor = engine(tmp_path, kind)
            ack = await actor.fetch_weights(FENCE, epoch, 3, digest, manifest, route)
            assert (ack.epoch, ack.version, ack.digest) == (epoch, 3, digest)
            about = await actor.served_weights()
            assert ("regions of tensors" in about.problem) == actor.takes_regions
            served = dict(named_weights(actor._module))  # noqa: SLF001
            for name, each in named_weights(model):
                assert torch.equal(served[name], each)
            with torch.no_grad():
                for _, each in named_weights(model):
                    each.mul_(2)
            manifest, digest, (route,), *_ = bench.publish(3)
            await actor.close()
        bench.close()
        with pytest.raises(WeightSyncFailed, match="no other rank holds bucket"):
            await engine(tmp_path).fetch_weights(FENCE, 9, 4, digest, manifest, route)

    asyncio.run(main())
