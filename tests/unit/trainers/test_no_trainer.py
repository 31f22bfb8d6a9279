"""The trainer of an evaluation: it has the version that engines load, and trains nothing."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from offbeat.config.loss_spec import LossSpec
from offbeat.messages.fences import Fence, StepKey
from offbeat.trainers.no_trainer import NoTrainer
from offbeat.weight_sync.served import digest_loaded

pytestmark = pytest.mark.real_clock

FENCE = Fence("run", 1)


async def test_it_has_version_0_of_the_files_that_engines_load(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    trainer = NoTrainer(str(tmp_path))

    state = await trainer.state(FENCE)
    assert (state.version, state.initial_digest) == (0, digest_loaded(str(tmp_path)))
    release = await trainer.publish_weights(FENCE, 0)
    assert (release.digest, release.nbytes) == (state.digest, 0)
    assert await trainer.restore(FENCE, 5) == state
    await trainer.restart()
    await trainer.close()


def test_it_refuses_to_train(tmp_path: Path) -> None:
    trainer: Any = NoTrainer(str(tmp_path))
    with pytest.raises(NotImplementedError, match="trains nothing"):
        asyncio.run(trainer.begin_train_step(FENCE, StepKey(1, 1, 0), LossSpec()))
