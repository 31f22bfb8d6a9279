"""``model.weights``: a run that begins with the weights of a training checkpoint of another one."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from offbeat.config.loss_spec import LossSpec
from offbeat.config.run import RunConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.launch.checks.model_files import check_weights
from offbeat.launch.initial_model import (
    INITIAL_MODEL,
    with_initial_model,
    with_start_deadlines,
)
from offbeat.messages.finding import Level
from offbeat.plugins.megatron.mapping import TensorBox
from offbeat.plugins.megatron.state import save_share
from offbeat.trainers.checkpoints.manifest import CheckpointCorrupt, Identity
from offbeat.trainers.checkpoints.store import CheckpointStore
from offbeat.trainers.torch import TorchTrainer
from offbeat.trainers.warm_start import UnfitWeights, found_weights, write_initial_model
from offbeat.weight_sync.region import Region
from tests.support.chunks import in_chunk
from tests.support.recipes import make_config
from tests.support.split_steps import MakeTrainer, Step

NORM = "model.norm.weight"


@pytest.fixture
def trained(trainer_of: MakeTrainer, step_data: Step) -> TorchTrainer:
    trainer = trainer_of(optimizer={"learning_rate": 1e-2})
    assert trainer.train(*in_chunk(step_data), LossSpec()).applied
    return trainer


@pytest.fixture
def state(trained: TorchTrainer, tmp_path: Path) -> Path:
    return saved(tmp_path / "run" / "checkpoints", trained.identity, trained.save_state)


def saved(root: Path, identity: Identity, write: Callable[[Path], None]) -> Path:
    CheckpointStore(root, identity, keep=2).save(40, "0" * 32, 1, write)
    return root / "state_40"


def run(model: Path, weights: Path | None) -> RunConfig:
    named = None if weights is None else str(weights)
    return make_config(model={"path": str(model), "weights": named})


def test_a_run_begins_with_the_weights_of_the_checkpoint_and_without_its_moments(
    trained: TorchTrainer, state: Path, tmp_path: Path
) -> None:
    config = with_initial_model(run(trained.model_path, state), tmp_path / "new")
    begun = TorchTrainer(
        config.model.path,
        trainer=TorchTrainerConfig(optimizer=OptimizerConfig()),
        model=ModelConfig(path=config.model.path, dtype="float64"),
        total_steps=2,
        max_model_len=64,
    )
    assert begun.weights_digest() == trained.weights_digest()
    assert (begun.steps_applied, config.model.weights) == (0, None)
    assert (tmp_path / "new" / INITIAL_MODEL / "tokenizer.json").read_text() == "{}"


def test_a_resumed_run_reads_what_it_began_with_after_the_checkpoint_is_gone(
    trained: TorchTrainer, state: Path, tmp_path: Path
) -> None:
    recipe = run(trained.model_path, state)
    begun = with_initial_model(recipe, tmp_path / "new")
    shutil.rmtree(state)
    assert with_initial_model(recipe, tmp_path / "new") == begun


def test_a_recipe_without_weights_is_left_as_it_is(tmp_path: Path) -> None:
    recipe = run(tmp_path, None)
    assert with_initial_model(recipe, tmp_path) is recipe
    assert not list(check_weights(recipe))
    assert not list(tmp_path.iterdir())


def test_starts_get_a_second_more_for_each_200_mb_of_the_model_unless_the_recipe_says_how_long(
    tmp_path: Path,
) -> None:
    for part in ("model-1.safetensors", "model-2.safetensors"):
        (tmp_path / part).touch()
        os.truncate(tmp_path / part, 6 * 10**9)
    begun = with_start_deadlines(make_config(tmp_path, trainer={"start_deadline_s": 7}))
    assert (begun.trainer.start_deadline_s, begun.generator.start_deadline_s) == (7, 180)
    begun = with_start_deadlines(make_config(tmp_path / "elsewhere"))
    assert (begun.trainer.start_deadline_s, begun.generator.start_deadline_s) == (120, 120)


def test_check_says_what_the_checkpoint_holds(trained: TorchTrainer, state: Path) -> None:
    (finding,) = check_weights(run(trained.model_path, state))
    assert finding.level is Level.OK
    assert f"{state}: version 40 of the torch trainer, Qwen3ForCausalLM" in finding.message
    assert "are those of model.path" in finding.message


def test_shares_of_megatron_ranks_become_one_model_directory(tmp_path: Path) -> None:
    weight, model = torch.arange(24.0).view(6, 4), tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    save_file({"w": torch.zeros(6, 4)}, model / "model.safetensors")

    def write(state: Path) -> None:
        for rank, (start, rows) in enumerate([(0, 4), (4, 2)]):
            region = Region((start, 0), (start + rows, 4))
            box = TensorBox("w", (6, 4), region, "local", Region.whole((rows, 4)))
            kinds = {"weight": {"local": weight[start : start + rows]}}
            save_share(state, rank, [box], kinds, 3)

    state = saved(tmp_path, Identity("megatron", "Tiny", "f" * 32), write)
    write_initial_model(state, model, tmp_path / "initial")
    assert load_file(tmp_path / "initial" / "model.safetensors")["w"].equal(weight)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((3,), f"has {NORM} as (64,), and the model as (3,)"),
        (None, f"has {NORM}, which the model does not have"),
    ],
)
def test_weights_of_another_model_are_refused_with_the_first_tensor_that_differs(
    trained: TorchTrainer, state: Path, tmp_path: Path, shape: tuple[int] | None, said: str
) -> None:
    other = shutil.copytree(trained.model_path, tmp_path / "other")
    (file,) = other.glob("*.safetensors")
    tensors = load_file(file)
    del tensors[NORM]
    save_file(tensors if shape is None else tensors | {NORM: torch.zeros(shape)}, file)
    with pytest.raises(UnfitWeights) as refused:
        write_initial_model(state, other, tmp_path / "initial")
    assert said in str(refused.value)
    (finding,) = check_weights(run(other, state))
    assert (finding.level, said in finding.message) == (Level.ERROR, True)
    assert not (tmp_path / "initial").exists()


def test_a_tensor_that_the_checkpoint_lacks_is_named(
    trained: TorchTrainer, state: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(trained.model_path, tmp_path / "other")
    save_file({"extra": torch.zeros(2)}, other / "more.safetensors")
    with pytest.raises(UnfitWeights, match=r"has no extra, which the model has as \(2,\)"):
        found_weights(state, other)


def test_a_damaged_checkpoint_is_named_and_leaves_no_directory(
    trained: TorchTrainer, state: Path, tmp_path: Path
) -> None:
    file = state / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointCorrupt, match="__0_0"):
        write_initial_model(state, trained.model_path, tmp_path / "initial")
    assert not (tmp_path / "initial").exists()


def test_what_is_no_training_checkpoint_is_refused_with_what_to_name(
    trained: TorchTrainer, state: Path, tmp_path: Path
) -> None:
    model = trained.model_path
    stub = saved(
        tmp_path / "dry", Identity("stub", "a stub", "f" * 32), lambda at: (at / "w").touch()
    )
    for path, fix in (
        (state.parent.parent, f"Name one: model.weights={state}"),
        (model, f"Set model.path to it, and leave model.weights out: {model}"),
        (tmp_path / "absent", "is not a directory"),
        (stub, "is the state of a dry run"),
    ):
        with pytest.raises(UnfitWeights) as refused:
            found_weights(path, model)
        assert fix in str(refused.value)


def test_adapters_are_refused_with_the_model_that_their_run_exports(tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.q_proj.lora_A.weight"
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({}))

    def write(at: Path) -> None:
        save_file({name: torch.zeros(2, 2)}, at / "adapter_model.safetensors")

    state = saved(tmp_path, Identity("torch", "adapters", "f" * 32), write)
    with pytest.raises(UnfitWeights, match="holds only adapters"):
        found_weights(state, model)
