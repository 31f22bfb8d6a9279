"""What ``offbeat check`` says of formats of weights, before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from offbeat.config.run import RunConfig
from offbeat.generators.spec import EngineSpec
from offbeat.messages.finding import Level
from offbeat.plugins.vllm.arguments import engine_arguments
from offbeat.plugins.vllm.coverage import read_coverage
from offbeat.plugins.vllm.precision_check import check_precision
from tests.support.recipes import make_config

LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (64, 256),
    f"{LAYER}self_attn.q_proj.weight": (512, 256),
    f"{LAYER}self_attn.k_proj.weight": (256, 256),
    f"{LAYER}self_attn.v_proj.weight": (256, 256),
    f"{LAYER}self_attn.o_proj.weight": (256, 512),
    f"{LAYER}mlp.gate.weight": (4, 256),
    f"{LAYER}mlp.experts.0.gate_proj.weight": (256, 256),
    f"{LAYER}mlp.experts.0.up_proj.weight": (256, 256),
    f"{LAYER}mlp.experts.0.down_proj.weight": (256, 256),
}


def model_in(
    folder: Path, *, dtype: torch.dtype = torch.bfloat16, heads: int = 2, **changes: Any
) -> Path:
    """Write a model's files; ``changes`` are shapes by the end of a name, or the quantization."""
    shapes = {
        name: next((shape for end, shape in changes.items() if end in name), shape)
        for name, shape in SHAPES.items()
    }
    save_file(
        {n: torch.zeros(s).to(dtype) for n, s in shapes.items()}, folder / "model.safetensors"
    )
    settings = {"num_attention_heads": 4, "num_key_value_heads": heads}
    if "quantization" in changes:
        settings["quantization_config"] = changes["quantization"]
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def config_of(folder: Path, vllm: dict[str, Any] | None = None, **values: Any) -> RunConfig:
    generator = {"backend": "vllm", "device": "cuda", "gpus": 1, "vllm": vllm or {}}
    model = {"path": str(folder), "dtype": "bfloat16"}
    return make_config(**{"model": model, "generator": generator, **values})


QUANTIZED = {"sync": {"quantize": "fp8_block"}}


def test_a_model_that_fits_is_said_in_tensors(tmp_path: Path) -> None:
    (finding,) = check_precision(config_of(model_in(tmp_path), **QUANTIZED))
    assert finding.level is Level.OK
    assert finding.message == "7 of 9 tensors are sent as fp8_block"
    assert check_precision(config_of(tmp_path)) == []


def test_an_engine_on_cpu_is_warned_of_processors_without_the_instructions(tmp_path: Path) -> None:
    config = config_of(model_in(tmp_path), **QUANTIZED)
    generator = config.generator.model_copy(update={"device": "cpu"})
    findings = check_precision(config.model_copy(update={"generator": generator}))
    assert [each.level for each in findings] == [Level.OK, Level.WARNING]
    assert "AMX" in findings[1].message


@pytest.mark.parametrize(
    ("changes", "vllm", "named"),
    [
        ({"q_proj": (500, 256)}, {}, "500 rows, which vLLM joins with others"),
        ({"v_proj": (200, 256)}, {}, ""),  # the last of those that are joined
        ({"up_proj": (200, 256)}, {}, ""),
        ({"gate_proj": (200, 256)}, {}, "200 rows, which vLLM joins"),
        ({}, {"tensor_parallel": 2}, ""),
        ({"heads": 1, "k_proj": (128, 256), "v_proj": (128, 256)}, {"tensor_parallel": 2}, ""),
        ({}, {"tensor_parallel": 4}, "256 rows over 4 ranks"),
        ({"o_proj": (256, 500)}, {"tensor_parallel": 2}, "500 columns over 2 ranks"),
        ({"o_proj": (250, 500)}, {}, ""),
    ],
)
def test_parts_of_an_engine_end_with_blocks(
    tmp_path: Path, changes: dict[str, Any], vllm: dict[str, Any], named: str
) -> None:
    first = check_precision(config_of(model_in(tmp_path, **changes), vllm, **QUANTIZED))[0]
    assert first.level is (Level.ERROR if named else Level.OK)
    assert named in first.message


def test_experts_that_are_not_cut_may_have_any_ranks(tmp_path: Path) -> None:
    folder = model_in(tmp_path)
    cut = check_precision(config_of(folder, {"tensor_parallel": 4}, **QUANTIZED))
    apart = {"tensor_parallel": 4, "expert_parallel": True}
    whole = check_precision(config_of(folder, apart, **QUANTIZED))
    assert "experts.0.gate_proj" in cut[0].message
    assert "experts" not in whole[0].message


def test_the_ranks_of_a_reshard_hold_whole_blocks(tmp_path: Path) -> None:
    folder = model_in(tmp_path)
    sync = {"transport": "reshard", "quantize": "fp8_block"}

    def first(trainer: dict[str, Any], **more: Any) -> Any:
        return check_precision(config_of(folder, sync=sync | more, trainer=trainer))[0]

    assert first({"backend": "torch", "data_parallel": 2}).level is Level.OK
    (refused) = first({"backend": "torch", "data_parallel": 3})
    assert "would cut a block in the trainer: 512 rows over 3 ranks" in refused.message
    assert "experts" not in refused.message
    assert "Set sync.transport to object_store" in refused.fix
    gathered = first({"backend": "torch", "data_parallel": 3}, transport="object_store")
    assert gathered.level is Level.OK
    tensor = {"backend": "torch", "data_parallel": 1, "tensor_parallel": 2}
    assert first(tensor).level is Level.OK
    both = first(tensor | {"data_parallel": 2}).message
    assert "2 tensors cannot be sent" in both
    assert "128 rows over 2 ranks: model.layers.0.self_attn.k_proj.weight" in both
    assert "256 rows over 4 ranks" in first(tensor | {"tensor_parallel": 4}).message
    megatron = {"backend": "megatron", "tensor_parallel": 4}
    assert "256 rows over 4 ranks" in first(megatron).message


@pytest.mark.parametrize(
    ("scheme", "named"),
    [
        ({"quant_method": "mxfp8"}, "bfloat16 to mxfp8 is not converted"),
        ({"quant_method": "awq", "bits": 4}, "bfloat16 to awq is not converted"),
        ({"quant_method": "fp8"}, "to fp8 with a scale per tensor is not"),
        (
            {"quant_method": "fp8", "weight_block_size": [1, 32], "fmt": "e5m2"},
            "to fp8 (e5m2) in blocks of 1x32, dynamic activations is not",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "sent only with sync.quantize"),
    ],
)
def test_other_schemes_are_refused_by_name_with_every_tensor_in_one_error(
    tmp_path: Path, scheme: dict[str, Any], named: str
) -> None:
    (in_files,) = check_precision(config_of(model_in(tmp_path, quantization=scheme)))
    assert in_files.level is Level.ERROR
    assert named in in_files.message
    assert "7 tensors cannot be sent" in in_files.message
    assert "experts.0.gate_proj.weight" in in_files.message
    assert "and 4 more" in in_files.message
    assert "model.path" in in_files.fix
    arguments = {"engine_args": {"hf_overrides": {"quantization_config": scheme}}}
    (overridden,) = check_precision(config_of(model_in(tmp_path), arguments))
    assert named in overridden.message
    assert "hf_overrides" in overridden.fix


def test_vllm_s_own_quantization_is_refused_by_its_name(tmp_path: Path) -> None:
    arguments = {"engine_args": {"quantization": "mxfp8"}}
    (finding,) = check_precision(config_of(model_in(tmp_path), arguments))
    assert "bfloat16 to mxfp8 is not converted" in finding.message
    assert "Leave generator.vllm.engine_args.quantization out" in finding.fix


def test_files_that_no_trainer_can_train_are_refused(tmp_path: Path) -> None:
    folder = model_in(tmp_path, dtype=torch.float8_e4m3fn)
    (finding,) = check_precision(config_of(folder, **QUANTIZED))
    assert "9 tensors cannot be sent" in finding.message
    assert "float8_e4m3fn to fp8_block is not converted: the trainer takes no steps" in (
        finding.message
    )


def test_an_engine_is_made_for_the_release_that_check_describes(tmp_path: Path) -> None:
    config = config_of(model_in(tmp_path), **QUANTIZED)
    spec = EngineSpec(
        name="generator-0",
        model=config.model,
        generator=config.generator,
        stub=config.stub,
        seed=0,
        run_dir=str(tmp_path),
        quantize=config.sync.quantize,
    )
    arguments = engine_arguments(spec)
    quantization = arguments["hf_overrides"]["quantization_config"]
    assert quantization["weight_block_size"] == [128, 128]
    assert quantization["modules_to_not_convert"] == [
        "model.embed_tokens",
        f"{LAYER}mlp.gate",
    ]
    assert arguments["load_format"] == "dummy"
    covered = read_coverage(str(tmp_path), "bfloat16", "fp8_block").tensors
    assert covered[f"{LAYER}self_attn.q_proj.weight"] == ((512, 256), "float8_e4m3fn")
    assert covered[f"{LAYER}self_attn.q_proj.weight_scale_inv"] == ((4, 2), "float32")
    assert covered[f"{LAYER}mlp.gate.weight"] == ((4, 256), "bfloat16")
    assert len(covered) == 9 + 7
