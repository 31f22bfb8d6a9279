"""On-policy distillation: the gradient of a teacher's part, and who the teacher is."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.loss import ClippedPgLossConfig
from offbeat.messages.fences import StepKey
from offbeat.trainers.errors import UnfitColumns
from offbeat.trainers.teacher import TeacherMismatch, check_tokenizers
from offbeat.trainers.torch import TorchTrainer
from offbeat.trainers.torch.model import load_model
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.support.plain_passes import plain_logprobs_of_group
from tests.support.split_steps import MakeTrainer, Step, run_step

COEF, REWARD_COEF = 0.7, 0.3
LOW, HIGH = 0.5, 0.5


@pytest.fixture(scope="session")
def teacher(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another architecture with other weights, which reads the same tokens."""
    path = tmp_path_factory.mktemp("teacher") / "llama"
    shutil.copytree(llama, path)
    (path / "tokenizer.json").write_text("{}")
    return path


def loss_with(teacher: Path, **changes: Any) -> LossSpec:
    section = {
        "teacher": str(teacher),
        "teacher_coef": COEF,
        "teacher_reward_coef": REWARD_COEF,
        "clip_low": LOW,
        "clip_high": HIGH,
    }
    return LossSpec(ClippedPgLossConfig.model_validate(section | changes))


def taught(trainer: TorchTrainer, step: Step, teacher: Path) -> Step:
    """The step's groups with the column that the trainer writes before it."""
    groups, advantages = step
    columns = trainer.prepare_logprobs(
        build_chunk(groups), policy=False, reference=False, temperature=1.0, teacher=str(teacher)
    )
    assert {name for each in columns for name in each} == {"teacher_logprobs"}
    return [{**group, **own} for group, own in zip(groups, columns, strict=True)], advantages


def plain_gradients(trainer: TorchTrainer, step: Step) -> dict[str, Tensor]:
    """The gradient the slow way: one token after another, in float64."""
    model, total, tokens = trainer.module, torch.zeros((), dtype=torch.float64), 0
    for group, advantages in zip(*step, strict=True):
        offsets, first = group["response_offsets"], len(group["prompt_ids"])
        for sample, reward_advantage in enumerate(advantages):
            own = slice(offsets[sample], offsets[sample + 1])
            ids = np.concatenate([group["prompt_ids"], group["response_ids"][own]])
            logits = model(input_ids=torch.tensor(ids, dtype=torch.int64)[None]).logits[0]
            logprobs = logits.log_softmax(-1)
            for t in np.flatnonzero(group["loss_mask"][own]):
                logprob = logprobs[first + t - 1, ids[first + t]]
                old = float(group["generation_logprobs"][own][t])
                gap = old - float(group["teacher_logprobs"][own][t])
                advantage = REWARD_COEF * reward_advantage - COEF * gap
                ratio = torch.exp(logprob - old)
                bounded = torch.clamp(ratio, 1 - LOW, 1 + HIGH)
                total = total - torch.minimum(ratio * advantage, bounded * advantage)
                tokens += 1
    (total / tokens).backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def test_the_gradient_with_a_teacher_is_that_of_a_plain_loop_in_float64(
    trainer_of: MakeTrainer, step_data: Step, teacher: Path
) -> None:
    trainer = trainer_of(max_tokens_per_microbatch=150)
    step = taught(trainer, step_data, teacher)
    want = plain_gradients(trainer, step)
    key, tokens = StepKey(1, 1, 0), 0
    trainer.begin_train_step(key, loss_with(teacher))
    for part in np.array_split(np.arange(len(step[0])), 3):
        key = key.next()
        tokens += trainer.train_microbatch(
            key, build_chunk([step[0][i] for i in part]), [step[1][i] for i in part]
        ).tokens
    for name, each in trainer.module.named_parameters():
        assert each.grad is not None
        worst = (each.grad / tokens - want[name]).abs().max()
        assert worst <= 1e-10 * want[name].abs().max(), name


def test_the_column_holds_what_the_teacher_alone_computes(
    trainer_of: MakeTrainer, step_data: Step, teacher: Path
) -> None:
    groups, _ = taught(trainer_of(), step_data, teacher)
    model = load_model(teacher, "float64", "cpu", trust_remote_code=False)
    with torch.no_grad():
        want = torch.cat(plain_logprobs_of_group(model, groups[0]))
    assert groups[0]["teacher_logprobs"] == pytest.approx(want.numpy(), abs=1e-4)


def test_a_teacher_alone_does_not_read_the_reward(
    trainer_of: MakeTrainer, step_data: Step, teacher: Path
) -> None:
    loss = loss_with(teacher, teacher_reward_coef=0.0)
    step = taught(trainer_of(), step_data, teacher)
    other = (step[0], [tuple(-3.0 * each for each in own) for own in step[1]])
    results = [run_step(trainer_of(), each, loss, 1) for each in (step, other)]
    assert results[0].applied
    assert results[0].grad_norm == results[1].grad_norm > 0


def test_the_teacher_does_not_learn(
    trainer_of: MakeTrainer, step_data: Step, teacher: Path
) -> None:
    trainer = trainer_of()
    before = taught(trainer, step_data, teacher)
    run_step(trainer, before, loss_with(teacher), 1)
    after = taught(trainer, step_data, teacher)
    for one, other in zip(before[0], after[0], strict=True):
        assert np.array_equal(one["teacher_logprobs"], other["teacher_logprobs"])


def test_the_distance_to_the_teacher_is_reported(
    trainer_of: MakeTrainer, step_data: Step, teacher: Path
) -> None:
    trainer = trainer_of()
    step = taught(trainer, step_data, teacher)
    result = run_step(trainer, step, loss_with(teacher), 1)
    gaps = [
        (group["generation_logprobs"] - group["teacher_logprobs"])[group["loss_mask"]]
        for group in step[0]
    ]
    assert result.metrics["train/teacher_kl"] == pytest.approx(
        np.concatenate(gaps).mean(), rel=1e-5
    )


def test_a_group_that_the_teacher_has_not_scored_is_not_trained(
    trainer_of: MakeTrainer, step_data: Step, teacher: Path
) -> None:
    trainer = trainer_of()
    groups, advantages = taught(trainer, step_data, teacher)
    del groups[1]["teacher_logprobs"]
    with pytest.raises(UnfitColumns, match="teacher_logprobs"):
        run_step(trainer, (groups, advantages), loss_with(teacher), 1)


def test_a_teacher_that_reads_other_tokens_is_refused(teacher: Path, tmp_path: Path) -> None:
    check_tokenizers(teacher, teacher)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(TeacherMismatch, match="has no tokenizer"):
        check_tokenizers(other, teacher)
    (other / "tokenizer.json").write_text('{"another": true}')
    with pytest.raises(TeacherMismatch, match=r"their tokenizer\.json differ"):
        check_tokenizers(other, teacher)
