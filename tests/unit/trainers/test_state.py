"""A torch trainer's state on disk: what is restored goes on as if nothing had happened."""

import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from offbeat.config.loss_spec import LossSpec
from offbeat.messages.failures import InitialWeightsChanged
from offbeat.messages.fences import StepKey
from offbeat.messages.training import StepResult
from offbeat.trainers.checkpoints.weight_files import open_tensors, save_tensors
from offbeat.trainers.torch import TorchTrainer
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.support.chunks import in_chunk
from tests.support.split_steps import state_of

MakeTrainer = Callable[..., TorchTrainer]
Take = Callable[[TorchTrainer], StepResult]
Step = tuple[list[dict[str, Any]], list[tuple[float, ...]]]
SCHEDULE = {"schedule": "cosine", "warmup_steps": 1, "weight_decay": 0.1}


@pytest.fixture
def take(step_data: Step) -> Take:
    """One split step, under an attempt that nobody used before."""
    attempts = count(1)

    def step(trainer: TorchTrainer) -> StepResult:
        key = StepKey(trainer.steps_applied + 1, next(attempts), 0)
        trainer.begin_train_step(key, LossSpec())
        trainer.train_microbatch(key.next(), *in_chunk(step_data))
        result = trainer.finish_train_step(key.next().next())
        assert result.applied
        return result

    return step


def numbers(result: StepResult) -> tuple[float, float, float]:
    return result.loss, result.grad_norm, result.learning_rate


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("into", ["a new process", "the same trainer"])
def test_the_steps_after_a_restore_are_bit_for_bit_those_of_an_undisturbed_run(
    tmp_path: Path, trainer_of: MakeTrainer, take: Take, dtype: str, into: str
) -> None:
    undisturbed = trainer_of(dtype=dtype, optimizer=SCHEDULE)
    for _ in range(2):
        take(undisturbed)
    undisturbed.save_state(tmp_path)
    saved_key = undisturbed.last_applied
    restored = trainer_of(dtype=dtype, optimizer=SCHEDULE)
    if into == "the same trainer":
        for _ in range(4):
            take(restored)
        restored.begin_train_step(StepKey(5, 7, 0), LossSpec())
    restored.load_state(tmp_path)
    assert restored.weights_digest() == undisturbed.weights_digest()
    assert (restored.steps_applied, restored.last_applied) == (2, saved_key)
    for _ in range(3):
        one, other = (numbers(take(each)) for each in (undisturbed, restored))
        assert one == other
    assert restored.weights_digest() == undisturbed.weights_digest()
    states = [state_of(each).tensors() for each in (undisturbed, restored)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainer_that_is_reset_is_a_new_one(
    request: pytest.FixtureRequest,
    trainer_of: MakeTrainer,
    take: Take,
    architecture: str,
    dtype: str,
) -> None:
    path: Path = request.getfixturevalue(architecture)
    used, new = (trainer_of(path, dtype=dtype, optimizer=SCHEDULE) for _ in range(2))
    initial = new.weights_digest()
    tensors = {name: id(each) for name, each in used.module.named_parameters()}
    for _ in range(3):
        take(used)
    used.reset()
    assert used.weights_digest() == initial
    assert (used.steps_applied, used.last_applied) == (0, None)
    assert {name: id(each) for name, each in used.module.named_parameters()} == tensors
    for trainer in (used, new):
        take(trainer)
    assert used.weights_digest() == new.weights_digest()


@pytest.fixture
def changing(tmp_path: Path, qwen3: Path) -> Path:
    """A model directory whose weights a test replaces."""
    return shutil.copytree(qwen3, tmp_path / "changing")


def change_weights(path: Path) -> None:
    file = path / "model.safetensors"
    save_tensors({name: each + 0.1 for name, each in load_file(file).items()}, file)


def test_a_reset_to_other_initial_weights_is_refused_with_both_digests(
    changing: Path, trainer_of: MakeTrainer
) -> None:
    trainer = trainer_of(changing)
    change_weights(changing)
    with pytest.raises(InitialWeightsChanged) as refused:
        trainer.reset()
    assert refused.value.began == trainer.initial_digest
    assert refused.value.found == trainer_of(changing).initial_digest


def test_a_reference_of_other_weights_than_the_trainer_began_with_is_refused(
    changing: Path, trainer_of: MakeTrainer, step_data: Step, take: Take
) -> None:
    trainer = trainer_of(changing)
    take(trainer)
    change_weights(changing)
    with pytest.raises(InitialWeightsChanged, match=trainer.initial_digest):
        trainer.prepare_logprobs(
            build_chunk(step_data[0]), policy=False, reference=True, temperature=1.0
        )


def test_a_state_saved_before_any_step_is_the_initial_model(
    tmp_path: Path, trainer_of: MakeTrainer, take: Take
) -> None:
    new, used = trainer_of(), trainer_of()
    new.save_state(tmp_path)
    take(used)
    used.load_state(tmp_path)
    for trainer in (used, new):
        take(trainer)
    assert used.weights_digest() == new.weights_digest()


def test_a_state_takes_about_the_bytes_it_says(
    tmp_path: Path, trainer_of: MakeTrainer, take: Take
) -> None:
    for dtype in ("float64", "bfloat16"):
        trainer, directory = trainer_of(dtype=dtype), tmp_path / dtype
        directory.mkdir()
        take(trainer)
        trainer.save_state(directory)
        nbytes = sum(file.stat().st_size for file in directory.iterdir())
        tensors = 3 * len(list(trainer.module.parameters())) + 2
        assert 0 < nbytes - trainer.state_nbytes < 2**11 * tensors


def test_saving_changes_nothing(tmp_path: Path, trainer_of: MakeTrainer, take: Take) -> None:
    saved, undisturbed = trainer_of(), trainer_of()
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        saved.save_state(tmp_path / str(number))
        for trainer in (saved, undisturbed):
            take(trainer)
    assert saved.weights_digest() == undisturbed.weights_digest()


def test_who_it_is_says_backend_model_and_type(
    trainer_of: MakeTrainer, take: Take, qwen3: Path, llama: Path
) -> None:
    trainer = trainer_of(qwen3, dtype="float32")
    before = trainer.identity
    take(trainer)
    assert trainer.identity == before == trainer_of(qwen3, dtype="float32").identity
    assert before.backend == "torch"
    assert before.model.startswith("Qwen3ForCausalLM of ")
    assert before.model.endswith(" float32 weights")
    others = [trainer_of(llama, dtype="float32"), trainer_of(qwen3, dtype="bfloat16")]
    assert len({before.fingerprint, *(each.identity.fingerprint for each in others)}) == 3


def test_a_disk_that_refuses_tensors_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        save_tensors({"a": torch.zeros(1)}, tmp_path / "missing" / "file")


def test_tensors_are_read_by_name(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6).reshape(2, 3).T, "b": torch.tensor(1.5)}
    save_tensors(tensors, tmp_path / "file")
    with open_tensors(tmp_path / "file") as opened:
        assert sorted(opened.keys()) == ["a", "b"]
        assert all(torch.equal(opened.get_tensor(name), tensors[name]) for name in tensors)
    with pytest.raises(OSError, match="cannot be read"), open_tensors(tmp_path / "other"):
        pass
