import json
import math
import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.generators.embedded.model import load_model
from offbeat.generators.embedded.proof import prepare_model
from offbeat.models.loading import (
    WeightsMismatch,
    WeightsNotFinite,
    WeightsUntied,
    check_files,
    check_values,
    load_causal_lm,
)
from offbeat.trainers.torch import TorchTrainer
from offbeat.trainers.torch.model import make_unfilled_model
from tests.support.model_families import FAMILIES, family_model

TINY = Path(__file__).parents[3] / "models" / "tiny-addition"
QUICK = {"Llama", "GPT2", "Qwen3Moe", "Bloom", "Mamba2", "Gemma2"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(TINY, tmp_path / "model")


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def change_settings(folder: Path, **settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def read_whole(folder: Path) -> None:
    load_causal_lm(folder, torch.float32, trust_remote_code=False)


def read_headers(folder: Path) -> None:
    check_files(folder)


def start_trainer(folder: Path, dtype: Literal["float32", "float64"] = "float32") -> None:
    TorchTrainer(
        folder,
        trainer=TorchTrainerConfig(),
        model=ModelConfig(path=str(folder), dtype=dtype),
        total_steps=1,
        max_model_len=64,
    )


def start_engine(folder: Path) -> None:
    load_model(folder, torch.float32, "cpu", trust_remote_code=False)


@pytest.mark.parametrize("read", [read_whole, read_headers, start_trainer, start_engine])
def test_a_model_whose_files_lack_a_layer_is_refused(
    folder: Path, read: Callable[[Path], None]
) -> None:
    change_weights(folder, lambda w: {name: w[name] for name in w if "layers.1." not in name})
    with pytest.raises(WeightsMismatch) as refused:
        read(folder)
    assert len(refused.value.missing) == 11
    assert all("layers.1." in name for name in refused.value.missing)
    assert "lack 11 tensors of the model" in str(refused.value)
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)  # noqa: S301


@pytest.mark.parametrize("read", [read_whole, read_headers, start_trainer, start_engine])
def test_a_model_whose_config_has_fewer_layers_than_its_files_is_refused(
    folder: Path, read: Callable[[Path], None]
) -> None:
    change_settings(folder, num_hidden_layers=1, layer_types=["full_attention"])
    with pytest.raises(WeightsMismatch) as refused:
        read(folder)
    assert not refused.value.missing
    assert "that the model lacks" in refused.value.problem


def with_a_head(folder: Path, factor: float) -> None:
    """Add a head to the files of a model, and tie it to the embedding in its config."""
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    change_weights(folder, lambda w: w | {head: factor * w[embedding]})
    change_settings(folder, tie_word_embeddings=True)


@pytest.mark.parametrize("read", [read_whole, read_headers, start_trainer, start_engine])
def test_a_config_that_ties_what_the_files_hold_apart_is_named(
    folder: Path, read: Callable[[Path], None]
) -> None:
    with_a_head(folder, factor=1.0)
    read(folder)
    with_a_head(folder, factor=2.0)
    with pytest.raises(WeightsUntied, match=r"ties lm_head\.weight to model\.emb") as refused:
        read(folder)
    assert "Set tie_word_embeddings to false" in str(refused.value)
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)  # noqa: S301
    change_settings(folder, tie_word_embeddings=False)
    read(folder)


def test_threads_that_load_a_tied_model_at_once_get_all_its_weights(folder: Path) -> None:
    change_weights(folder, lambda w: {name: w[name] for name in w if name != "lm_head.weight"})
    change_settings(folder, tie_word_embeddings=True)
    with ThreadPoolExecutor(2) as threads:
        for loaded in [threads.submit(read_whole, folder) for _ in range(20)]:
            loaded.result()


def read_values(folder: Path) -> None:
    check_values(folder, 1 << 30)


def read_boxes(folder: Path) -> None:
    pytest.importorskip("megatron.core", reason="needs the extra megatron")
    from offbeat.plugins.megatron.hf_files import load_boxes  # noqa: PLC0415
    from offbeat.plugins.megatron.mapping import TensorBox  # noqa: PLC0415
    from offbeat.weight_sync.region import Region  # noqa: PLC0415

    name = "model.layers.1.mlp.down_proj.weight"
    weight = torch.empty(load_file(folder / "model.safetensors")[name].shape)
    whole = Region.whole(tuple(weight.shape))
    load_boxes({"own": weight}, [TensorBox(name, whole.shape, whole, "own", whole)], folder)


@pytest.mark.plugins
@pytest.mark.filterwarnings("ignore")  # of megatron-core, for each kernel that it does not find
@pytest.mark.parametrize("read", [read_values, read_whole, start_trainer, start_engine, read_boxes])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_named_with_its_count(
    folder: Path, read: Callable[[Path], None], bad: float
) -> None:
    name = "model.layers.1.mlp.down_proj.weight"

    def spoil(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        weights[name].view(-1)[[3, 70]] = bad
        return weights

    read(folder)
    change_weights(folder, spoil)
    with pytest.raises(WeightsNotFinite, match=f"2 of the .* values of {name} are not") as refused:
        read(folder)
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)  # noqa: S301


def test_weights_beyond_the_range_of_float16_are_refused_in_float16_only(folder: Path) -> None:
    name = "model.norm.weight"
    change_weights(folder, lambda w: w | {name: 1e6 * w[name]})
    load_causal_lm(folder, torch.bfloat16, trust_remote_code=False)
    with pytest.raises(WeightsNotFinite, match="not finite in float16"):
        load_causal_lm(folder, torch.float16, trust_remote_code=False)


@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe", "DeepseekV3"])
def test_a_model_computes_in_float64_with_experts_too(family: str, tmp_path: Path) -> None:
    family_model(family).save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float64, "cpu", trust_remote_code=False)
    prepare_model(model, max_model_len=64)
    start_trainer(tmp_path, "float64")
    shell = make_unfilled_model(model.config, torch.float64, trust_remote_code=False)
    assert shell.config._experts_implementation == model.config._experts_implementation  # noqa: SLF001 -- no public name


def test_values_are_read_up_to_a_bound(folder: Path) -> None:
    size = (folder / "model.safetensors").stat().st_size
    assert check_values(folder, 0) == (0, size)
    read, total = check_values(folder, 1)
    assert 0 < read < total == size
    read, total = check_values(folder, size)
    assert 0.9 * total < read <= total


@pytest.mark.parametrize("read", [read_whole, read_headers])
def test_a_weight_of_another_shape_is_refused_by_name(
    folder: Path, read: Callable[[Path], None]
) -> None:
    name = "model.norm.weight"
    change_weights(folder, lambda w: w | {name: w[name][:-1].clone()})
    with pytest.raises(WeightsMismatch) as refused:
        read(folder)
    assert refused.value.reshaped == (name,)


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in FAMILIES],
)
def test_what_transformers_has_saved_lacks_nothing_and_holds_nothing_else(
    family: str, tmp_path: Path
) -> None:
    transformers.logging.disable_progress_bar()
    family_model(family).save_pretrained(tmp_path)
    read_whole(tmp_path)
    read_headers(tmp_path)
