"""Adapters on an image-text model: tower and text model alike, and the merged export computes them."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.messages.media import get_media
from offbeat.plugins.lora.adapters import Adapters
from offbeat.trainers.torch import TorchTrainer
from offbeat.trainers.torch.torch_trainer import TorchParts
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.support.image_text_models import make, picture_groups, plain_logprobs
from tests.support.split_steps import run_step

pytest.importorskip("peft", reason="the extra `lora` is not installed")


def test_adapters_of_tower_and_text_model_are_trained_and_merged(tmp_path: Path) -> None:
    make("idefics3").save_pretrained(tmp_path / "base")
    path, out = tmp_path / "base", tmp_path / "out"
    trainer = TorchTrainer(
        path,
        parts=TorchParts(trained=Adapters),
        trainer=TorchTrainerConfig.model_validate(
            {"optimizer": {"learning_rate": 1e-2}, "lora": {"rank": 4, "alpha": 8.0}}
        ),
        model=ModelConfig(path=str(path), dtype="float32"),
        total_steps=10,
        max_model_len=128,
    )
    groups, rng = picture_groups((1, 2, 0, 1)), np.random.default_rng(0)

    def columns() -> list[dict[str, Any]]:
        return trainer.prepare_logprobs(
            build_chunk(groups), policy=True, reference=True, temperature=1.0
        )

    before, initial = columns(), {name: each.clone() for name, each in trainer.iterate_weights()}
    advantages = [tuple(rng.normal(0, 1, 3).tolist()) for _ in groups]
    assert run_step(trainer, (groups, advantages), LossSpec(), chunks=2).applied
    moved = {name for name, each in trainer.iterate_weights() if not each.equal(initial[name])}
    for part in ("vision_model", "connector", "text_model"):
        assert any(part in name for name in moved)
    trainer.save(out)
    merged = AutoModelForImageTextToText.from_pretrained(out, local_files_only=True).eval()
    for group, old, new in zip(groups, before, columns(), strict=True):
        np.testing.assert_array_equal(new["reference_logprobs"], old["reference_logprobs"])
        assert np.abs(new["policy_logprobs"] - old["policy_logprobs"]).max() > 1e-3
        for first, end in itertools.pairwise(group["response_offsets"]):
            response = group["response_ids"][first:end].tolist()
            with torch.no_grad():
                want = plain_logprobs(
                    merged, group["prompt_ids"].tolist(), response, get_media(group)
                )
            np.testing.assert_allclose(new["policy_logprobs"][first:end], want, atol=1e-5, rtol=0)
