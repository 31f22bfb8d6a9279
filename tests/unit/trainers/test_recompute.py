"""Layers that are computed again in backward: it happens, it saves memory, and nothing else changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.config.loss_spec import LossSpec
from offbeat.messages.fences import StepKey
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.torch import TorchTrainer
from offbeat.trainers.torch.model import decoder_layers, load_model, recompute_layers
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.support.chunks import in_chunk

MakeTrainer = Callable[..., TorchTrainer]
Step = tuple[list[dict[str, Any]], list[tuple[float, ...]]]
ONE_MICROBATCH = {"max_tokens_per_microbatch": 4096}


def attention_passes(trainer: TorchTrainer) -> list[int]:
    """How often the attention of each layer has run, counted from here on."""
    layers = decoder_layers(trainer.module)
    counts = [0] * len(layers)
    for index, layer in enumerate(layers):

        def count(*_: object, at: int = index) -> None:
            counts[at] += 1

        parts = dict(layer.named_children())
        parts["self_attn" if "self_attn" in parts else "attn"].register_forward_pre_hook(count)
    return counts


def microbatch(trainer: TorchTrainer, data: Step) -> int:
    """One chunk's forward and backward, in one microbatch; bytes that were kept for backward."""
    kept = dict[int, int]()
    weights = {each.untyped_storage().data_ptr() for each in trainer.module.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    key = StepKey(1, 1, 0)
    trainer.begin_train_step(key, LossSpec())
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = trainer.train_microbatch(key.next(), *in_chunk(data))
    assert result.microbatches == 1
    return sum(kept.values())


def gradients(trainer: TorchTrainer) -> dict[str, Tensor]:
    named = trainer.module.named_parameters()
    return {name: each.grad for name, each in named if each.grad is not None}


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("shared_prompt", [True, False])
def test_every_layer_is_computed_twice_and_the_gradient_is_the_same_to_the_last_bit(
    request: pytest.FixtureRequest,
    trainer_of: MakeTrainer,
    step_data: Step,
    architecture: str,
    *,
    shared_prompt: bool,
) -> None:
    path: Path = request.getfixturevalue(architecture)
    one, other = (
        trainer_of(
            path,
            shared_prompt=shared_prompt,
            activation_checkpointing=recompute,
            **ONE_MICROBATCH,
        )
        for recompute in (False, True)
    )
    once, twice = attention_passes(one), attention_passes(other)
    microbatch(one, step_data)
    microbatch(other, step_data)
    assert (once, twice) == ([1, 1], [2, 2])
    want, got = gradients(one), gradients(other)
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)


def test_what_is_kept_for_backward_is_far_less(trainer_of: MakeTrainer, step_data: Step) -> None:
    kept, recomputed = (
        microbatch(trainer_of(activation_checkpointing=each, **ONE_MICROBATCH), step_data)
        for each in (False, True)
    )
    assert recomputed < kept / 4


def test_without_a_backward_pass_nothing_is_computed_twice(
    trainer_of: MakeTrainer, step_data: Step
) -> None:
    trainer = trainer_of(activation_checkpointing=True, **ONE_MICROBATCH)
    passes = attention_passes(trainer)
    trainer.prepare_logprobs(
        build_chunk(step_data[0]), policy=True, reference=False, temperature=1.0
    )
    assert passes == [1, 1]


def test_the_model_stays_in_evaluation_mode_under_its_own_names(trainer_of: MakeTrainer) -> None:
    plain, trainer = (
        trainer_of(dtype="float32", activation_checkpointing=each) for each in (False, True)
    )
    assert not any(each.training for each in trainer.module.modules())
    assert trainer.identity == plain.identity
    assert list(dict(trainer.iterate_weights())) == list(dict(plain.iterate_weights()))


def test_a_model_that_names_no_layers_is_refused_with_a_way_out(qwen3: Path) -> None:
    model = load_model(qwen3, "float32", "cpu", trust_remote_code=False)
    model._no_split_modules = None  # noqa: SLF001 -- as models have it that name none
    with pytest.raises(UntrainableModel, match=r"Set trainer\.activation_checkpointing to false"):
        recompute_layers(model)
