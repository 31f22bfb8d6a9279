"""Parameters that a torch trainer does not train: what a step, a checkpoint and a start make of them."""

import math
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.loss import ClippedPgLossConfig
from offbeat.messages.fences import StepKey
from offbeat.trainers.checkpoints.store import CheckpointStore
from offbeat.trainers.errors import CheckpointMismatch, UntrainableModel
from offbeat.trainers.torch import TorchTrainer
from offbeat.trainers.torch.state import read_saved_names
from tests.support.chunks import in_chunk
from tests.support.split_steps import (
    MakeTrainer,
    Step,
    naive_gradients,
    run_step,
    state_of,
    worst_relative_error,
)

LOSS = LossSpec(ClippedPgLossConfig())
LOWER = ["model.embed_tokens.*", "model.layers.0.*"]
MATRICES = ["*_proj.weight", "*embed_tokens*", "lm_head.*"]
TIED = ["model.embed_tokens.weight", "lm_head.weight"]


def is_frozen(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, each) for each in patterns)


def plain_trained(trainer: TorchTrainer, patterns: list[str]) -> dict[str, nn.Parameter]:
    """Freeze by hand the model of a trainer that was made without patterns; return what is left."""
    named = dict(trainer.module.named_parameters())
    for name, each in named.items():
        each.requires_grad_(not is_frozen(name, patterns))
    return {name: each for name, each in named.items() if each.requires_grad}


def weights(trainer: TorchTrainer) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in trainer.iterate_weights()}


@pytest.mark.parametrize(
    ("architecture", "patterns"),
    [
        ("qwen3", LOWER),
        ("qwen3", ["lm_head.*", "*norm*"]),
        ("qwen3", MATRICES),
        ("llama", TIED),
        ("gpt2", ["transformer.h.*"]),
    ],
    ids=["lower layers", "head and norms", "matrices", "tied head", "all layers"],
)
def test_gradient_and_step_are_those_of_a_plain_loop_without_the_frozen_parameters(
    request: pytest.FixtureRequest,
    trainer_of: MakeTrainer,
    step_data: Step,
    architecture: str,
    patterns: list[str],
) -> None:
    path: Path = request.getfixturevalue(architecture)
    plain = trainer_of(path)
    trained = plain_trained(plain, patterns)
    want = naive_gradients(plain, step_data, LOSS)
    assert want.keys() == trained.keys()
    norm = math.sqrt(sum(float(each.square().sum()) for each in want.values()))
    optimizer = {"max_grad_norm": norm / 3, "weight_decay": 0.5}
    trainer = trainer_of(path, optimizer=optimizer, freeze=patterns)

    key = StepKey(1, 1, 0)
    trainer.begin_train_step(key, LOSS)
    trainer.train_microbatch(key.next(), *in_chunk(step_data))
    tokens = sum(int(each["loss_mask"].sum()) for each in step_data[0])
    got = {
        name: each.grad / tokens
        for name, each in trainer.module.named_parameters()
        if each.grad is not None
    }
    assert worst_relative_error(got, want) <= 1e-10

    result = trainer.finish_train_step(key.next().next())
    assert result.grad_norm == pytest.approx(norm, rel=1e-10)
    for name, each in trained.items():
        each.grad = want[name]
    nn.utils.clip_grad_norm_(trained.values(), norm / 3)
    decay = {True: 0.5, False: 0.0}
    torch.optim.AdamW(
        [{"params": [each], "weight_decay": decay[each.ndim > 1]} for each in trained.values()],
        lr=1e-2,
        betas=trainer._config.optimizer.betas,  # noqa: SLF001
        eps=trainer._config.optimizer.eps,  # noqa: SLF001
    ).step()
    # AdamW divides a gradient near 0 by itself, so that rounding shows
    for name, each in trainer.module.named_parameters():
        plainly = plain.module.get_parameter(name)
        assert torch.allclose(each, plainly, rtol=0.0, atol=1e-7)
        assert not is_frozen(name, patterns) or torch.equal(each, plainly)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_parameters_keep_every_bit_and_have_no_optimizer_state(
    trainer_of: MakeTrainer, step_data: Step, dtype: str
) -> None:
    trainer = trainer_of(dtype=dtype, freeze=LOWER, optimizer={"weight_decay": 0.5})
    before = weights(trainer)
    for number in (1, 2):
        assert run_step(trainer, step_data, LOSS, 2, number).applied
    moved = {name for name, each in weights(trainer).items() if not torch.equal(each, before[name])}
    assert moved == {name for name in before if not is_frozen(name, LOWER)}
    state = state_of(trainer).tensors()
    assert {
        n.partition("/")[2] for n in state if n.startswith(("exp_avg/", "exp_avg_sq/"))
    } == moved
    assert len(state["steps"]) == len(moved)
    assert all(f"weight/{name}" in state for name in before)
    whole = trainer_of(dtype=dtype)
    frozen = sum(each.numel() for name, each in before.items() if name not in moved)
    itemsize = 4 if dtype == "bfloat16" else trainer.module.dtype.itemsize
    assert whole.state_nbytes - trainer.state_nbytes == frozen * (
        3 * itemsize - trainer.module.dtype.itemsize
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_trainer_goes_on_bit_for_bit(
    tmp_path: Path, trainer_of: MakeTrainer, step_data: Step, dtype: str
) -> None:
    undisturbed = trainer_of(dtype=dtype, freeze=LOWER)
    run_step(undisturbed, step_data, LOSS, 1)
    undisturbed.save_state(tmp_path)
    assert not any(
        is_frozen(name.removeprefix("exp_avg/"), LOWER) for name in read_saved_names(tmp_path)
    )
    restored = trainer_of(dtype=dtype, freeze=LOWER)
    restored.load_state(tmp_path)
    steps = [run_step(each, step_data, LOSS, 1, number=2) for each in (undisturbed, restored)]
    assert steps[0].grad_norm == steps[1].grad_norm
    assert restored.weights_digest() == undisturbed.weights_digest()


def test_a_reset_trainer_is_frozen_as_before(trainer_of: MakeTrainer, step_data: Step) -> None:
    trainer = trainer_of(dtype="float32", freeze=LOWER)
    before = trainer.weights_digest()
    first = trainer.train(*in_chunk(step_data), LOSS)
    after = trainer.weights_digest()
    trainer.reset()
    assert trainer.weights_digest() == before
    assert trainer.train(*in_chunk(step_data), LOSS).grad_norm == first.grad_norm
    assert trainer.weights_digest() == after


@pytest.mark.parametrize("other", [[], ["lm_head.*"]], ids=["nothing", "the head"])
def test_a_checkpoint_of_other_frozen_parameters_is_refused(
    tmp_path: Path, trainer_of: MakeTrainer, other: list[str]
) -> None:
    trainer = trainer_of(dtype="float32", freeze=LOWER)
    store = CheckpointStore(tmp_path, trainer.identity, keep=1)
    store.save(1, trainer.weights_digest(), trainer.state_nbytes, trainer.save_state)
    others = trainer_of(dtype="float32", freeze=other)
    reader = CheckpointStore(tmp_path, others.identity, keep=1)
    with pytest.raises(CheckpointMismatch, match=r"of them frozen .* and trainer\.freeze"):
        reader.newest(1)


@pytest.mark.parametrize(
    ("patterns", "told"),
    [
        ([*LOWER, "nothing.*"], r"matches 'nothing\.\*' of .*begin with lm_head, model"),
        ([*LOWER, "lm_hed.*"], r"matches 'lm_hed\.\*' of .*The nearest name is lm_head\.weight"),
        (["LM_HEAD.*"], r"no parameter whose name matches 'LM_HEAD"),
        (["model.*", "lm_head.weight"], "no parameter to train: trainer.freeze matches all"),
    ],
    ids=["like no name", "misspelt", "other case", "everything"],
)
def test_patterns_that_cannot_be_meant_are_refused_by_name(
    trainer_of: MakeTrainer, patterns: list[str], told: str
) -> None:
    with pytest.raises(UntrainableModel, match=told):
        trainer_of(freeze=patterns)


@pytest.mark.parametrize("half", TIED)
def test_half_of_a_tied_head_is_refused_as_the_other_half_would_move_it(
    trainer_of: MakeTrainer, llama: Path, half: str
) -> None:
    (other,) = set(TIED) - {half}
    with pytest.raises(UntrainableModel, match=f"ties {half}, .* to {other}, which it does not"):
        trainer_of(llama, freeze=[half])
    frozen: Any = trainer_of(llama, freeze=TIED).module
    assert not frozen.lm_head.weight.requires_grad
    assert frozen.lm_head.weight is frozen.model.embed_tokens.weight
