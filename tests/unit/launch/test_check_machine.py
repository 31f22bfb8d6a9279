"""What ``offbeat check`` says of this machine; every finding that is not ok names a fix."""

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

from offbeat.config.run import RunConfig
from offbeat.doors import find_installed_version, is_installed
from offbeat.environments.tokenizer import TOKENIZER_FILES
from offbeat.launch.checks.algorithm import check_checkpoints, check_failed_samples
from offbeat.launch.checks.files import check_not_a_uri, check_prompts, check_run_dir
from offbeat.launch.checks.machine import (
    Machine,
    check_cores,
    check_memory,
    check_shared_memory,
    memory_needed_bytes,
)
from offbeat.launch.checks.model_files import ModelFiles, check_lengths, read_model
from offbeat.launch.checks.model_proof import (
    check_end_tokens,
    check_model_proof,
    count_trained_parameters,
)
from offbeat.launch.checks.prompt_lengths import check_prompt_lengths
from offbeat.launch.checks.report import summary
from offbeat.launch.checks.software import (
    check_gpus,
    check_packages,
    check_ray_address,
    gpus_wanted,
)
from offbeat.launch.checks.user_code import (
    check_sampler,
    check_secrets,
    check_targets,
    check_variables,
)
from offbeat.launch.commands.main import app
from offbeat.messages.finding import Finding, Level, ok, size
from offbeat.plugins.vllm.checks import check_vllm_model
from tests.support.model_families import LONG_ROPES, family_model

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")
_LEVELS = ("error", "warning", "ok")
GIB = 2**30
TINY = ModelFiles(parameters=1000, weight_bytes=4000, max_positions=512, model_type="qwen3")
HUGE = ModelFiles(parameters=10**10, weight_bytes=4 * 10**10, max_positions=None, model_type="x")
MACHINE = Machine(
    cores=2, memory_bytes=8 * GIB, memory_free_bytes=4 * GIB, shared_memory_bytes=4 * GIB
)


def config(**values: Any) -> RunConfig:
    return RunConfig.model_validate({"steps": 10, "model": {"path": "x"}, **values})


def one(findings: Iterable[Finding]) -> Finding:
    (finding,) = findings
    assert finding.fix or finding.level is Level.OK, "what is not ok says how to fix it"
    return finding


# --- the command ---------------------------------------------------------------------------------


def test_the_quickstart_passes_with_a_line_for_each_thing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    result = CliRunner().invoke(app, ["check", QUICKSTART, "--run-dir", str(run_dir)])
    assert result.exit_code == 0, result.output
    for subject in ("recipe", "ray", "model", "prompts", "cores", "memory", "disk", "wandb"):
        assert f" {subject}: " in result.stdout
    assert not run_dir.exists(), "looking leaves nothing behind"


def test_a_run_in_one_process_is_checked_by_the_option_that_starts_it(tmp_path: Path) -> None:
    command = ["check", QUICKSTART, "--local", "--run-dir", str(tmp_path / "run")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "ok      runtime: local" in result.stdout


def test_everything_wrong_is_in_one_report_with_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    overrides = ["model.path=nowhere", "environment.name=custom", "environment.target=no_such:X"]
    result = CliRunner().invoke(app, ["check", QUICKSTART, *overrides, "--run-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "nowhere is not a directory" in result.stdout
    assert "model.path=hf://OWNER/NAME" in result.stdout
    assert "no module no_such" in result.stdout
    assert "holds another run (summary.json)" in result.stdout
    assert "environment 'custom' makes no prompts" in result.stdout
    assert "\n4 errors (" in result.stdout
    levels = [line.split()[0] for line in result.stdout.splitlines() if line.startswith(_LEVELS)]
    assert levels == sorted(levels, key=_LEVELS.index), "the worst first"
    assert result.stdout.index("\nversions") > result.stdout.rindex("\nok ")


def test_what_another_choice_leaves_unused_is_named(tmp_path: Path) -> None:
    recipe = tmp_path / "two.yaml"
    recipe.write_text(
        f"extends: {QUICKSTART}\nsampler: {{name: in_order, max_staleness: 1, max_lookahead: 1}}\n"
    )
    choice = ["sampler.name=ready_first", "model.path=nowhere"]
    result = CliRunner().invoke(app, ["check", str(recipe), *choice])
    assert "not used, another choice by name was made: sampler.max_lookahead (" in result.output


def test_the_summary_counts_and_names_what_is_wrong() -> None:
    bad = [Finding(Level.ERROR, "a", "b", "c"), Finding(Level.WARNING, "d", "b", "c")]
    assert summary([ok("e", "b"), *bad, bad[0]]) == "2 errors (a), 1 warning (d)"
    assert summary([ok("a", "b")]) == "Everything is in order."


@pytest.mark.parametrize(
    ("nbytes", "text"), [(12, "12 bytes"), (1536, "1.5 KiB"), (3 * GIB, "3 GiB")]
)
def test_sizes_are_for_people(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


# --- machine -------------------------------------------------------------------------------------


def test_more_threads_than_cores_is_a_warning() -> None:
    finding = one(check_cores(config(generator={"engines": 2}), MACHINE))
    assert finding.level is Level.WARNING
    assert "1 trainer and 2 generator threads on 2 cores" in finding.message
    assert "a machine of 3 cores or more" in finding.fix
    threads = one(check_cores(config(trainer={"threads": 2}), MACHINE))
    assert threads.fix.startswith("Lower trainer.threads, generator.threads")
    sides = {"backend": "torch", "threads": 1, "encoder": {"threads": 5}}
    encoder = one(check_cores(config(trainer=sides), Machine(4, GIB, GIB, None)))
    assert encoder.fix.startswith("Lower trainer.threads, trainer.encoder.threads, generator")


def test_adapters_need_peft() -> None:
    needed = {finding.subject for finding in check_packages(config(trainer={"lora": {}}))}
    assert needed - {finding.subject for finding in check_packages(config())} == {"peft"}


def test_stub_backends_take_no_cores() -> None:
    stub = {"backend": "stub"}
    assert one(check_cores(config(generator=stub, trainer=stub), MACHINE)).level is Level.OK


def test_weights_are_counted_once_for_each_holder() -> None:
    def weights(**values: Any) -> int:
        run = config(**values)
        return memory_needed_bytes(run, HUGE) - memory_needed_bytes(run, ModelFiles(0, 0, 0, ""))

    copy = 4 * HUGE.parameters
    assert weights() == 6 * copy, "weights, gradients, two moments; published; one engine"
    assert weights(generator={"engines": 3}) == 8 * copy
    assert weights(sync={"delta": True}) == 8 * copy, "the base in the trainer and in the engine"
    assert weights(algorithm={"loss": {"kl_coef": 0.1}}) == 7 * copy, "and the reference"
    assert weights(model={"path": "x", "dtype": "bfloat16"}) == 3 * copy
    assert weights(trainer={"device": "cuda", "gpus": 1}) == 2 * copy


def test_of_a_run_with_adapters_only_what_holds_the_base_is_counted() -> None:
    def weights(**values: Any) -> int:
        run = config(trainer={"lora": {}}, **values)
        return memory_needed_bytes(run, HUGE) - memory_needed_bytes(run, ModelFiles(0, 0, 0, ""))

    copy = 4 * HUGE.parameters
    assert weights() == 3 * copy, "trainer; one engine, as loaded and as served"
    assert weights(algorithm={"loss": {"kl_coef": 0.1}}) == 3 * copy, "its own reference"
    assert weights(sync={"adapter": "merged"}) == 3 * copy, "trainer; published; one engine"
    assert weights(generator={"device": "cuda", "gpus": 1}) == 2 * copy


def test_a_model_beyond_all_memory_cannot_work() -> None:
    finding = one(check_memory(config(), MACHINE, HUGE))
    assert finding.level is Level.ERROR
    assert "10,000,000,000 parameters" in finding.message


@pytest.mark.parametrize(("trained", "copies"), [(None, 6), (5 * 10**9, 4.5), (0, 3)])
def test_what_is_not_trained_has_neither_gradient_nor_moments(
    trained: int | None, copies: float
) -> None:
    """Of the weights, the published ones and the engine's; 3 more copies of what is trained."""
    processes = memory_needed_bytes(config(), TINY) - 6 * 4 * TINY.parameters
    needed = memory_needed_bytes(config(), HUGE, trained)
    assert needed == processes + copies * 4 * HUGE.parameters


def test_the_memory_of_a_recipe_counts_what_its_patterns_leave_to_train() -> None:
    model = ROOT / "models" / "tiny-addition"
    recipe = config(model={"path": str(model)}, trainer={"freeze": ["model.layers.0.*"]})
    weights = load_file(model / "model.safetensors")
    kept = [each for name, each in weights.items() if not name.startswith("model.layers.0.")]
    assert count_trained_parameters(recipe) == sum(each.numel() for each in kept)
    assert count_trained_parameters(config(model={"path": str(model)})) is None


def test_a_model_beyond_free_memory_may_work() -> None:
    busy = Machine(2, 8 * GIB, memory_free_bytes=GIB, shared_memory_bytes=None)
    assert one(check_memory(config(), busy, TINY)).level is Level.WARNING
    assert one(check_memory(config(), MACHINE, TINY)).level is Level.OK


def test_a_buffer_beyond_shared_memory_is_a_warning() -> None:
    small = Machine(2, 8 * GIB, 4 * GIB, shared_memory_bytes=64 * 2**20)
    finding = one(check_shared_memory(config(), small, TINY))
    assert finding.level is Level.WARNING
    assert "64 MiB free" in finding.message
    assert one(check_shared_memory(config(), MACHINE, TINY)).level is Level.OK


def test_a_release_beyond_the_object_store_is_a_warning_unless_it_goes_another_way() -> None:
    model = ModelFiles(10**9, 4 * 10**9, None, "x")  # 3.7 GiB; the store of MACHINE has 2.4 GiB
    finding = one(check_shared_memory(config(), MACHINE, model))
    assert finding.level is Level.WARNING
    assert "each release of the weights has 3.73 GiB" in finding.message
    assert "object store here 2.4 GiB" in finding.message
    assert finding.fix.startswith("Set sync.transport to reshard, or enlarge")
    for values in (
        {"sync": {"wire_dtype": "bfloat16"}},
        {"trainer": {"backend": "torch", "lora": {}}},
    ):
        found = one(check_shared_memory(config(**values), MACHINE, model))
        assert "each release" not in found.message


# --- model ---------------------------------------------------------------------------------------


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "max_position_embeddings": 128})
    )
    (tmp_path / "tokenizer.json").write_text("{}")
    write_weights(tmp_path / "model.safetensors", {"a": [2, 3], "b": [5]})
    return tmp_path


def write_weights(path: Path, shapes: dict[str, list[int]]) -> None:
    tensors: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        tensors[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(end))


def test_parameters_are_counted_over_all_weight_files(model_dir: Path) -> None:
    write_weights(model_dir / "more.safetensors", {"c": [100], "scalar": []})
    model, findings = read_model(model_dir)
    assert model is not None
    assert (model.parameters, model.max_positions, model.model_type) == (112, 128, "qwen3")
    assert one(findings).level is Level.OK


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer"),
        ("model.safetensors", "has no *.safetensors file"),
    ],
)
def test_a_missing_file_of_the_model_is_named(model_dir: Path, name: str, message: str) -> None:
    (model_dir / name).unlink()
    model, findings = read_model(model_dir)
    assert model is None
    assert message in one(findings).message


@pytest.mark.parametrize("name", TOKENIZER_FILES)
def test_a_model_may_have_any_kind_of_tokenizer(model_dir: Path, name: str) -> None:
    (model_dir / "tokenizer.json").rename(model_dir / name)
    model, _ = read_model(model_dir)
    assert model is not None


def test_all_missing_files_are_named_at_once(tmp_path: Path) -> None:
    assert len(read_model(tmp_path)[1]) == 3


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\n",
        b"",
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x09\0\0\0\0\0\0\0{",
    ],
)
def test_a_file_that_is_no_safetensors_is_named(model_dir: Path, content: bytes) -> None:
    (model_dir / "model.safetensors").write_bytes(content)
    finding = one(read_model(model_dir)[1])
    assert "model.safetensors is not a complete safetensors file" in finding.message
    assert "Git LFS" in finding.fix


def test_a_safetensors_file_that_was_cut_off_is_named_with_its_bytes(model_dir: Path) -> None:
    whole = (model_dir / "model.safetensors").stat().st_size
    os.truncate(model_dir / "model.safetensors", whole - 1)
    finding = one(read_model(model_dir)[1])
    assert f"it has {whole - 1} of {whole} bytes" in finding.message


def test_a_file_that_the_index_names_and_that_is_missing_is_named(model_dir: Path) -> None:
    places = {"a": "model.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    index = model_dir / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert "has no model-2.safetensors" in one(read_model(model_dir)[1]).message
    index.write_text("{")
    assert f"{index} cannot be read" in one(read_model(model_dir)[1]).message


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_broken_json_file_is_named(model_dir: Path, name: str) -> None:
    (model_dir / name).write_text("{")
    assert f"{name} cannot be read" in one(read_model(model_dir)[1]).message


def test_the_positions_of_a_multimodal_model_are_those_of_its_text_part(model_dir: Path) -> None:
    nested = {"text_config": {"max_position_embeddings": 64}}
    (model_dir / "config.json").write_text(json.dumps(nested))
    model, _ = read_model(model_dir)
    assert model is not None
    assert model.max_positions == 64


def test_sequences_longer_than_the_model_knows_cannot_work() -> None:
    assert one(check_lengths(config(), TINY)).level is Level.OK
    finding = one(check_lengths(config(generator={"max_model_len": 513}), TINY))
    assert finding.level is Level.ERROR
    assert "max_position_embeddings=512" in finding.message
    assert finding.fix == "Set generator.max_model_len to 512 or less."


@pytest.mark.parametrize(
    ("settings", "key", "bound"),
    [
        ({"model_type": "gpt2", "n_positions": 128}, "n_positions", 128),
        ({"model_type": "mpt", "max_seq_len": 256}, "max_seq_len", 256),
        ({"model_type": "of its own", "max_sequence_length": 64}, "max_sequence_length", 64),
        ({"model_type": "bloom"}, "max_position_embeddings", None),
        (
            {
                "max_position_embeddings": 64,
                "rope_scaling": {"type": "dynamic", "factor": 4.0},
            },
            "max_position_embeddings",
            256,
        ),
    ],
)
def test_the_bound_of_positions_is_found_by_the_models_own_name_of_it(
    settings: dict[str, Any], key: str, bound: int | None, model_dir: Path
) -> None:
    (model_dir / "config.json").write_text(json.dumps(settings))
    model, _ = read_model(model_dir)
    assert model is not None
    assert (model.positions_key, model.max_positions) == (key, bound)
    if bound:
        (finding,) = check_lengths(config(generator={"max_model_len": bound + 1}), model)
        assert f"{key}={bound}" in finding.message


# --- what the model computes ---------------------------------------------------------------------


def proofs(model: PreTrainedModel, folder: Path, **sections: Any) -> dict[str, Finding]:
    """What the check says of a model that it loads, by subject."""
    model.save_pretrained(folder)
    recipe = config(model={"path": str(folder)}, **sections)
    return {finding.subject: finding for finding in check_model_proof(recipe)}


def test_a_model_that_computes_rows_and_decodes_exactly_is_in_order(tmp_path: Path) -> None:
    found = proofs(family_model("Llama"), tmp_path, generator={"max_model_len": 128})
    assert {finding.level for finding in found.values()} == {Level.OK}
    assert set(found) == {"weight values", "packed rows", "decoding"}


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("q_proj", "rank 16, alpha 32, on q_proj"),
        ("query", "LlamaForCausalLM has no module query"),
        ("embed_tokens", "model.embed_tokens, which is not a linear module but Embedding"),
    ],
)
def test_targets_of_adapters_that_the_model_lacks_are_an_error(
    tmp_path: Path, target: str, told: str
) -> None:
    trainer = {"backend": "torch", "lora": {"target_modules": [target]}}
    finding = proofs(family_model("Llama"), tmp_path, trainer=trainer)["adapters"]
    assert told in finding.message
    assert finding.level is (Level.OK if target == "q_proj" else Level.ERROR)


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("model.layers.*", "in 3 of "),
        ("lm_hed.*", "no parameter whose name matches 'lm_hed.*' of trainer.freeze"),
        ("*", "no parameter to train"),
    ],
)
def test_the_check_says_how_many_parameters_are_trained(
    tmp_path: Path, pattern: str, told: str
) -> None:
    model = family_model("Llama")
    trainer = {"backend": "torch", "freeze": [pattern]}
    finding = proofs(model, tmp_path, trainer=trainer)["trained parameters"]
    assert told in finding.message
    assert finding.level is (Level.OK if pattern == "model.layers.*" else Level.ERROR)
    if finding.level is Level.OK:
        trained = sum(
            each.numel() for name, each in model.named_parameters() if ".layers." not in name
        )
        whole = sum(each.numel() for each in model.parameters())
        assert finding.message.startswith(f"{trained:,} of {whole:,}, ")


def test_the_check_refuses_to_balance_experts_whose_routers_are_all_frozen(tmp_path: Path) -> None:
    trainer = {"backend": "torch", "moe": {"z_loss_coef": 0.01}, "freeze": ["*.mlp.gate.weight"]}
    finding = proofs(family_model("Qwen3Moe"), tmp_path, trainer=trainer)["experts"]
    assert finding.level is Level.ERROR
    assert "trainer.freeze matches all of them" in finding.message


def test_stop_tokens_outside_the_vocabulary_are_an_error(tmp_path: Path) -> None:
    generator = {"sampling": {"stop_token_ids": [-5, 3, 100_000]}}
    found = proofs(family_model("Llama"), tmp_path, generator=generator)["end of samples"]
    assert found.level is Level.ERROR
    assert "[-5, 100000] are outside the vocabulary of 64" in found.message


def test_stop_strings_are_an_error_without_a_tokenizer(tmp_path: Path) -> None:
    family_model("Llama").save_pretrained(tmp_path)
    generator = {"sampling": {"stop": ["</answer>"]}}
    recipe = config(model={"path": str(tmp_path)}, generator=generator)
    finding = one(check_end_tokens(recipe))
    assert finding.level is Level.ERROR
    assert "generator.sampling.stop=['</answer>'] needs the text of tokens" in finding.message
    words = Tokenizer(WordLevel({"a": 0, "b": 3}))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    assert "</answer>" in one(check_end_tokens(recipe)).message
    assert one(check_end_tokens(recipe)).level is Level.OK


def test_ids_of_the_head_that_the_tokenizer_lacks_are_counted(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"a": 0, "b": 3}))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    found = proofs(family_model("Llama"), tmp_path)["vocabulary"]
    assert "62 of the model's 64 token ids are not in its tokenizer" in found.message


def test_a_model_whose_files_name_no_end_of_a_sample_is_a_warning(tmp_path: Path) -> None:
    family_model("Llama").save_pretrained(tmp_path)
    recipe = config(model={"path": str(tmp_path)})
    assert one(check_end_tokens(recipe)).level is Level.OK
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text("{}")
    finding = one(check_end_tokens(recipe))
    assert finding.level is Level.WARNING
    assert "every sample is cut off" in finding.message
    assert "stop_token_ids" in finding.fix


@pytest.mark.parametrize("trainer", ["torch", "megatron"])
def test_weight_files_that_lack_tensors_of_the_model_are_an_error_with_their_names(
    tmp_path: Path, trainer: str
) -> None:
    family_model("Llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights = {name: each for name, each in weights.items() if "layers.1." not in name}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    recipe = config(model={"path": str(tmp_path)}, trainer={"backend": trainer})
    finding = one(check_model_proof(recipe))
    assert finding.level is Level.ERROR
    assert "lack 9 tensors of the model (model.layers.1." in finding.message


@pytest.mark.parametrize("trainer", ["torch", "megatron"])
def test_weights_that_no_run_could_use_are_an_error_with_their_names(
    tmp_path: Path, trainer: str
) -> None:
    family_model("Llama").save_pretrained(tmp_path)
    recipe = config(model={"path": str(tmp_path)}, trainer={"backend": trainer})
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"][2] = math.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = {finding.subject: finding for finding in check_model_proof(recipe)}
    finding = found["weight values"]
    assert finding.level is Level.ERROR
    assert "1 of the 32 values of model.norm.weight are not finite" in finding.message
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": True}))
    finding = one(check_model_proof(recipe))
    assert "ties lm_head.weight to model.embed_tokens.weight" in finding.message
    assert "Set tie_word_embeddings to false" in finding.fix


def test_a_model_whose_samples_cannot_share_a_prompt_is_told_of_with_what_happens_instead(
    tmp_path: Path,
) -> None:
    found = proofs(family_model("Rwkv"), tmp_path)
    assert found["packed rows"].level is Level.WARNING
    assert "each gets a separate row" in found["packed rows"].message
    assert found["decoding"].level is Level.ERROR


def test_vllm_is_refused_where_it_would_scale_positions_otherwise(tmp_path: Path) -> None:
    rope = {"rope_parameters": LONG_ROPES["dynamic"], "max_position_embeddings": 64}
    family_model("Llama", **rope).save_pretrained(tmp_path)

    def found(max_model_len: int) -> list[Finding]:
        generator = {"backend": "vllm", "max_model_len": max_model_len}
        return list(check_vllm_model(config(model={"path": str(tmp_path)}, generator=generator)))

    assert not found(64)
    assert "different frequencies than the trainer" in one(found(65)).message


@pytest.mark.parametrize(
    ("family", "refused"),
    [("llama", False), ("idefics3", False), ("gemma3", True), ("qwen2_5_vl", True)],
)
def test_vllm_is_refused_for_image_text_models_whose_pictures_it_was_not_compared_on(
    tmp_path: Path, family: str, refused: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    told = config(model={"path": str(tmp_path)}, generator={"backend": "vllm"})
    findings = list(check_vllm_model(told))
    assert [f"model_type={family}" in each.message for each in findings] == [True] * refused


# --- files ---------------------------------------------------------------------------------------


def test_a_fresh_run_directory_is_fine_and_not_made(tmp_path: Path) -> None:
    findings = list(check_run_dir(tmp_path / "a" / "b", TINY, requested=True))
    assert [finding.level for finding in findings] == [Level.OK, Level.OK]
    assert not (tmp_path / "a").exists()


def test_a_uri_is_no_run_directory() -> None:
    (finding,) = check_not_a_uri(Path("s3://bucket/run"))
    assert finding.level is Level.ERROR and "s3:/bucket/run is a URI" in str(finding)
    assert not list(check_not_a_uri(Path("/disk/run")))
    assert not list(check_not_a_uri(None))


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_a_directory_asked_for_that_holds_another_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    finding, _ = check_run_dir(tmp_path, None, requested=True)
    assert finding.level is Level.ERROR
    assert f"holds another run ({name})" in finding.message


def test_the_recipes_own_directory_may_hold_another_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    finding, _ = check_run_dir(tmp_path, None, requested=False)
    assert finding.level is Level.OK
    assert "the next free number is taken" in finding.message


def test_a_file_is_no_place_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    finding, _ = check_run_dir(tmp_path / "file" / "run", None, requested=False)
    assert "is a file" in finding.message


def test_a_disk_too_small_for_two_checkpoints_is_a_warning(tmp_path: Path) -> None:
    endless = ModelFiles(10**18, 10**18, None, "x")
    _, finding = check_run_dir(tmp_path, endless, requested=False)
    assert finding.level is Level.WARNING


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [("float32", "28.2 GiB"), ("bfloat16", "26.2 GiB"), ("float64", "56.2 GiB")],
)
def test_space_on_disk_follows_the_recipe_and_not_the_files_of_the_model(
    tmp_path: Path, dtype: str, wanted: str
) -> None:
    model = ModelFiles(2**30, 2 * 2**30, None, "x")  # a file of 16 bits
    _, found = check_run_dir(tmp_path, model, requested=False, checkpoints=2, dtype=dtype)
    assert f"take about {wanted}" in found.message, "two states with float32 masters, the export"


def test_a_bad_row_of_the_prompts_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": }\n')
    finding = one(check_prompts(config(data={"path": str(path)})))
    assert finding.level is Level.ERROR
    assert "rows.jsonl:2: is not JSON" in finding.message


def test_prompts_that_end_before_the_run_are_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n' * 40)
    data = {"path": str(path), "epochs": 2}
    finding = one(check_prompts(config(data=data)))
    assert "40 rows in 2 epochs end after 5 steps; steps=" in finding.message
    few = one(check_prompts(config(data={**data, "epochs": 1}, groups_per_step=64)))
    assert "40 rows in 1 epochs end after 1 steps, the last of which is smaller" in few.message
    assert one(check_prompts(config(data=data, steps=5))).level is Level.OK


def test_so_are_those_that_an_environment_makes() -> None:
    finding = one(check_prompts(config(data={"epochs": 1}, steps=10**6)))
    assert finding.level is Level.WARNING and "in 1 epochs end after" in finding.message
    assert one(check_prompts(config(steps=10**6))).level is Level.OK


def test_a_run_without_checkpoints_is_warned_of_what_a_restart_costs() -> None:
    finding = one(check_checkpoints(config(checkpoint={"interval": 0}, steps=5000)))
    assert finding.level is Level.WARNING and "up to 5,000 with" in finding.message
    finding = one(check_checkpoints(config(checkpoint={"interval": 50}, steps=5000)))
    assert finding.level is Level.OK and "at most 50 steps" in finding.message


def test_a_missing_prompt_file_is_an_error(tmp_path: Path) -> None:
    finding = one(check_prompts(config(data={"path": str(tmp_path / "no.jsonl")})))
    assert finding.level is Level.ERROR


# --- software ------------------------------------------------------------------------------------


def test_the_packages_of_this_environment_are_found() -> None:
    assert {finding.level for finding in check_packages(config())} == {Level.OK}


def of_package(name: str, version: str, **values: Any) -> Finding:
    """What the check says of one package of this version; all others are the newest."""
    versions = {"torch": "2.15.0", "transformers": "5.24.0", name: version}
    found = check_packages(config(**values), lambda each: versions.get(each, "1.0"))
    return next(finding for finding in found if finding.subject == name)


def test_pyarrow_is_needed_only_for_the_log_of_groups() -> None:
    def find_version(name: str) -> str | None:
        return None if name == "pyarrow" else find_installed_version(name)

    (missing,) = (
        each for each in check_packages(config(), find_version) if each.level is Level.ERROR
    )
    assert missing.subject == "pyarrow" and "or set rollout.log to false" in missing.fix
    levels = {each.level for each in check_packages(config(rollout={"log": False}), find_version)}
    assert levels == {Level.OK}


@pytest.mark.parametrize(
    ("name", "version", "level"),
    [
        ("torch", "2.10.1", Level.WARNING),
        ("torch", "2.11.0", Level.OK),
        ("torch", "2.15.1+cu130", Level.OK),
        ("torch", "2.16.0", Level.WARNING),
        ("torch", "nightly", Level.OK),
        ("transformers", "5.16.1", Level.WARNING),
        ("transformers", "5.24.3", Level.OK),
        ("transformers", "6.0.0", Level.WARNING),
    ],
)
def test_a_version_that_was_never_tested_is_a_warning(
    name: str, version: str, level: Level
) -> None:
    finding = of_package(name, version)
    assert finding.level is level and finding.message.startswith(version)
    if level is Level.WARNING:
        assert "was never tested; " in finding.message and "make test-versions" in finding.fix


def test_several_ranks_of_a_torch_that_cannot_shard_are_an_error() -> None:
    several = {"trainer": {"backend": "torch", "data_parallel": 2}}
    refused = of_package("torch", "2.12.1", **several)
    assert refused.level is Level.ERROR
    assert refused.message == (
        "the trainer needs torch 2.13 or newer on several ranks; this is torch 2.12.1"
    )
    assert refused.fix == "Install torch 2.13 or newer, or train on one rank."
    assert of_package("torch", "2.13.0", **several).level is Level.OK
    assert of_package("torch", "2.12.1").level is Level.OK


@pytest.fixture
def user_code(tmp_path: Path) -> Path:
    package = tmp_path / "mine" / "rewards"
    package.mkdir(parents=True)
    (tmp_path / "mine" / "__init__.py").write_text("")
    (package / "math.py").write_text(
        "import sys\nassert 'pytest' not in sys.modules\ndef f(row, text): ...\n"
    )
    (package / "policy.py").write_text("class Policy: ...\n")
    return tmp_path


@pytest.mark.parametrize(
    ("module", "level"),
    [
        ("mine.rewards.math", Level.OK),
        ("mine.rewards.maths", Level.ERROR),
        ("mine.rewards.math.x", Level.ERROR),
        ("yours", Level.ERROR),
        ("shutil", Level.OK),
        ("__main__.x", Level.ERROR),
    ],
)
def test_user_code_is_imported_in_a_child_process(
    user_code: Path, module: str, level: Level
) -> None:
    name = "copy" if module == "shutil" else "f"
    run = config(environment={"name": "function", "target": f"{module}:{name}"})
    assert one(check_targets(run, user_code)).level is level


def test_a_grader_of_the_package_is_found_if_its_extra_is_installed(tmp_path: Path) -> None:
    run = config(environment={"name": "function", "target": "math_verify"})
    finding = one(check_targets(run, tmp_path))
    if not is_installed("math_verify"):
        assert finding.level is Level.ERROR
        assert finding.fix == "Install it: pip install 'offbeat[math]'."
    else:
        assert finding.level is Level.OK


@pytest.mark.parametrize(
    ("module", "level"), [("mine.rewards.policy", Level.OK), ("yours", Level.ERROR)]
)
def test_so_is_a_policy_of_the_users_own(user_code: Path, module: str, level: Level) -> None:
    run = config(sampler={"name": "custom", "target": f"{module}:Policy"})
    assert one(check_sampler(run, user_code)).level is level


def check_code(folder: Path, code: str, **environment: Any) -> list[Finding]:
    """What the check says of the target ``mine:f`` where ``mine.py`` has this code."""
    (folder / "mine.py").write_text(code)
    section = {"name": "function", "target": "mine:f", **environment}
    return list(check_targets(config(environment=section), folder))


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("x = 1\ndef f(:\n", "invalid syntax, in line 2"),
        ("def g(): ...\n", "module mine has no 'f'"),
        (
            "import offbeat\ncode = offbeat.run_recipe('r.yaml')\ndef f(a, b): ...\n",
            "mine.py starts a run when it is imported. Put the start of the run under",
        ),
        (
            "import offbeat\nrun = offbeat.train(steps=1)\ndef f(a, b): ...\n",
            "mine.py starts a run when it is imported. Put the start of the run under",
        ),
        ("class Model:\n    def train(self): ...\nModel().train()\ndef f(a, b): ...\n", ""),
        ("rate = 1 / 0\ndef f(a, b): ...\n", "mine.py:1 in <module>: ZeroDivisionError"),
        ("import os\nos._exit(3)\n", "the process of mine:f ended with exit code 3"),
        (
            "def f(data_source, solution_str, ground_truth=None, extra_info=None): ...\n",
            "has the arguments of a reward of verl",
        ),
        ("def f(completions, **more): ...\n", "rewards a batch, as in TRL"),
        ("f = 'as f does'\n", "has no 'f' that can be called, but a str"),
        ("x = '\0'\n", "null bytes"),
        ("from shutil import copy as f\n", ""),
        ("globals().update(f=print)\n", ""),
        ("import sys\nsys.modules[__name__].f = print\n", ""),
    ],
)
def test_code_that_does_not_hold_its_target_is_refused(
    tmp_path: Path, code: str, problem: str
) -> None:
    finding = one(check_code(tmp_path, code))
    assert (finding.level is Level.ERROR) is bool(problem)
    assert problem in f"{finding.message}. {finding.fix}"


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import json, no_such.client\n", "no_such"),
        ("from no_such.client import Client\n", "no_such"),
        ("from os import path\nimport mine\n", ""),
        ("if False:\n    import no_such\n", ""),
    ],
)
def test_a_package_that_user_code_imports_and_that_is_not_installed_is_named(
    tmp_path: Path, code: str, absent: str
) -> None:
    finding = one(check_code(tmp_path, f"{code}async def f(task, client): ...\n", name="agent"))
    assert (finding.level is Level.ERROR) is bool(absent)
    assert f"mine.py imports {absent}, which is not installed" in finding.message or not absent


def test_an_option_that_an_agent_does_not_take_is_named(tmp_path: Path) -> None:
    code = "async def f(task, client, *, turns=1): ...\n"
    finding = one(check_code(tmp_path, code, name="agent", options={"turn": 2}))
    assert "f() in line 1 takes no 'turn', which options name" in finding.message


@pytest.mark.parametrize(
    ("base", "max_turns", "is_warned"),
    [("MultiTurn", 1, True), ("protocol.MultiTurn", 1, True), ("MultiTurn", 4, False),
     ("SingleTurn", 1, False)],
)  # fmt: skip
def test_a_multi_turn_environment_whose_episodes_end_after_one_turn_is_warned_of(
    tmp_path: Path, base: str, max_turns: int, *, is_warned: bool
) -> None:
    code = (
        "from offbeat.environments import protocol\nfrom offbeat.environments.protocol import *\n"
    )
    code += f"class Game({base}): ...\n"
    findings = check_code(tmp_path, code, name="custom", target="mine:Game", max_turns=max_turns)
    assert [each.level for each in findings] == [Level.OK, *[Level.WARNING] * is_warned]
    assert not is_warned or "environment.max_turns is 1" in findings[-1].message


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (
            "def f(prompt, response, near=1): ...\n",
            "f() in line 1 takes no 'neer', which options name",
        ),
        ("def f(prompt, response, *, neer): ...\n", ""),
        ("def f(prompt, response, **options): ...\n", ""),
        ("from functools import cache\n@cache\ndef f(prompt, response): ...\n", ""),
    ],
)
def test_an_option_that_a_reward_does_not_take_is_told_before_it_is_run(
    tmp_path: Path, code: str, problem: str
) -> None:
    finding = one(check_code(tmp_path, code, options={"neer": 1}))
    assert (finding.level is Level.ERROR) is bool(problem)
    assert problem in finding.message


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (
            "def f(completions, **rest): ...",
            "rewards a batch, as in TRL; a reward gets one row and one response",
        ),
        (
            "def f(source, solution, truth, extra=None): ...",
            "needs 'truth': use row['truth'] if the row has this key, or set it in the options of the reward",
        ),
        ("def f(*both): ...", ""),
        ("def f(prompt, response, near=1): ...", ""),
    ],
)
@pytest.mark.parametrize(
    "named", [{"target": "mine:f"}, {"target": None, "rewards": {"one": {"target": "mine:f"}}}]
)
def test_a_reward_that_cannot_be_called_is_refused_before_a_run(
    tmp_path: Path, code: str, problem: str, named: dict[str, Any]
) -> None:
    finding = one(check_code(tmp_path, code, **named))
    assert (finding.level is Level.ERROR) is bool(problem)
    assert problem in finding.message


@pytest.mark.parametrize(
    ("body", "level", "problem"),
    [
        ("return len(row['prompt'])", None, ""),
        ("return [1.0 for _ in row]", Level.ERROR, "the reward is list [1.0]; return a float"),
        ("return float('nan')", Level.ERROR, "the reward is nan"),
        ("return float(row['answer'])", Level.WARNING, "mine.py:2 in f: KeyError: 'answer'"),
        ("return None if not text else 1.0", Level.WARNING, "the reward is None"),
        ("while True: pass", Level.WARNING, "ran longer than 0.2 s; killed"),
    ],
)
def test_a_reward_is_called_once_for_a_row_and_an_empty_response(
    tmp_path: Path, body: str, level: Level | None, problem: str
) -> None:
    (tmp_path / "mine.py").write_text(f"def f(row, text):\n    {body}\n")
    section = {"name": "function", "target": "mine:f", "reward_deadline_s": 0.2}
    found, *called = check_targets(config(environment=section), tmp_path, {"prompt": "1+1="})
    assert found.level is Level.OK
    assert [each.level for each in called] == ([] if level is None else [level])
    assert all(problem in each.message for each in called)


def test_a_reward_of_a_near_name_is_offered(tmp_path: Path) -> None:
    code = "def reward(prompt, response): ...\n"
    finding = one(check_code(tmp_path, code, target="mine:rewards"))
    assert "did you mean 'reward'?" in finding.message


@pytest.mark.parametrize(("form", "is_warned"), [("def", True), ("async def", False)])
def test_limits_of_calls_at_once_are_of_no_use_to_a_reward_that_is_not_async(
    tmp_path: Path, form: str, *, is_warned: bool
) -> None:
    findings = check_code(tmp_path, f"{form} f(prompt, response): ...\n", reward_retries=2)
    assert [each.level for each in findings] == [Level.OK, *[Level.WARNING] * is_warned]
    assert not is_warned or "environment.reward_retries is not used" in findings[-1].message


def test_an_absent_package_that_an_extra_brings_is_named_with_it(tmp_path: Path) -> None:
    extras = {"smolagents": "smolagents", "openai": "agents", "math_verify": "math"}
    absent = next((each for each in extras if not is_installed(each)), "")
    if not absent:
        pytest.skip("every extra is installed")
    code = f"import {absent}\nasync def f(task, client): ...\n"
    finding = one(check_code(tmp_path, code, name="agent"))
    assert f"pip install 'offbeat[{extras[absent]}]'" in finding.fix


def test_variables_that_are_named_and_not_set_are_a_warning() -> None:
    section = {"name": "agent", "target": "mine:run", "variables": ["PATH", "NOT_SET_HERE"]}
    finding = one(check_variables(config(environment=section)))
    assert finding.level is Level.WARNING
    assert "environment.variables: NOT_SET_HERE not set on this machine" in finding.message


def test_the_prompts_of_evaluations_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\nno json\n')
    path = str(tmp_path / "eval.jsonl")
    found = list(check_prompts(config(eval={"interval": 5, "path": path})))
    assert [finding.level for finding in found] == [Level.OK, Level.ERROR]
    assert "eval.jsonl:2" in str(found[1])


def test_prompts_of_evaluations_are_read_also_where_no_step_is_evaluated(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.jsonl")
    found = list(check_prompts(config(eval={"sets": {"held-out": {"path": missing}}})))
    assert [finding.level for finding in found] == [Level.OK, Level.ERROR]
    assert "missing.jsonl: cannot be read" in found[1].message
    assert [finding.level for finding in check_prompts(config())] == [Level.OK]


def test_an_evaluation_of_rows_that_are_trained_on_is_named_for_what_it_is() -> None:
    found = list(check_prompts(config(eval={"interval": 5})))
    assert [finding.level for finding in found] == [Level.OK, Level.WARNING]
    assert "evaluations score prompts that the run trains on" in found[1].message


def test_a_value_that_a_run_has_left_out_of_its_config_is_asked_for() -> None:
    options = {"credentials": ["REDACTED", "REDACTED"], "id": 7}
    finding = one(check_secrets(config(environment={"options": options})))
    assert finding.level is Level.ERROR
    assert "environment.options.credentials is REDACTED" in finding.message
    assert list(check_secrets(config())) == []


SHORT = '{"prompt": "1+1="}\n'
LONG = f'{{"prompt": "{"1+" * 60}1="}}\n'


def check_rows(path: Path, rows: str, **sections: Any) -> list[Finding]:
    """What the check says of the lengths of these rows, for a model of 64 tokens."""
    path.write_text(rows)
    recipe = config(
        model={"path": str(ROOT / "models" / "tiny-addition")},
        generator={"max_model_len": 64},
        data={"path": str(path)},
        environment={"name": "function", "target": "mine:reward"},
        **sections,
    )
    return list(check_prompt_lengths(recipe))


def test_rows_that_leave_no_room_for_a_response_are_told_before_a_run_draws_them(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.jsonl"
    found = check_rows(path, SHORT * 300 + LONG, eval={"interval": 1, "path": str(path)})
    assert [finding.level for finding in found] == [Level.WARNING] * 2
    assert "the 200 longest of 301 rows in data.path were tokenised: 1 leave" in found[0].message
    assert "row 300" in found[0].message and "eval.path" in found[1].message


def test_rows_that_the_tokenizer_cannot_write_are_named(tmp_path: Path) -> None:
    rows = SHORT + '{"prompt": "Grüße"}\n'
    lengths, unknown = check_rows(tmp_path / "rows.jsonl", rows)
    assert (lengths.level, unknown.level) == (Level.OK, Level.WARNING)
    assert "1 have text that the tokenizer of model.path does not know" in unknown.message
    assert "row 1" in unknown.message


@pytest.mark.parametrize(
    ("rows", "steps", "drop_budget", "level"),
    [
        (LONG * 3 + SHORT, 2, 2, Level.ERROR),
        (LONG * 3 + SHORT, 2, 3, Level.WARNING),
        (LONG * 3 + SHORT, 1, 2, Level.WARNING),  # it may draw others
        (LONG * 3, 1, 9, Level.ERROR),
    ],
)
def test_rows_that_are_sure_to_end_the_run_are_an_error(
    tmp_path: Path, rows: str, steps: int, drop_budget: int, level: Level
) -> None:
    sizes = {"steps": steps, "groups_per_step": 2, "rollout": {"drop_budget": drop_budget}}
    assert one(check_rows(tmp_path / "rows.jsonl", rows, **sizes)).level is level


def test_built_in_environments_need_no_target() -> None:
    assert list(check_targets(config(), Path())) == []


def test_a_cluster_elsewhere_is_pointed_out() -> None:
    requested = list[tuple[str, int]]()

    def there(host: str, port: int) -> None:
        requested.append((host, port))

    for address in ("10.0.0.1:6379", "ray://[::1]:10001", "auto"):
        finding = one(check_ray_address({"RAY_ADDRESS": address}, there))
        assert finding.level is Level.WARNING
        assert address in finding.message
    assert requested == [("10.0.0.1", 6379), ("::1", 10001)]
    assert one(check_ray_address({})).level is Level.OK


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("127.0.0.1:6399", "nobody answers there: connection refused"),
        ("nonsense", "this is not an address"),
        (":6379", "this is not an address"),
        ("head:ray", "this is not an address"),
    ],
)
def test_an_address_where_no_cluster_is_cannot_work(address: str, problem: str) -> None:
    def nobody(host: str, port: int) -> None:
        raise ConnectionRefusedError("connection refused")

    finding = one(check_ray_address({"RAY_ADDRESS": address}, nobody))
    assert finding.level is Level.ERROR
    assert f"RAY_ADDRESS={address}: {problem}" in finding.message
    assert "unset RAY_ADDRESS" in finding.fix


def test_gpus_of_all_actors_are_added_up() -> None:
    run = config(
        generator={"engines": 4, "gpus": 0.5, "device": "cuda"},
        trainer={"data_parallel": 2, "gpus": 1, "device": "cuda"},
    )
    assert gpus_wanted(run) == 4
    assert one(check_gpus(run, 4)).level is Level.OK
    finding = one(check_gpus(run, 3))
    assert finding.level is Level.ERROR
    assert "4 asked for by trainer.gpus and generator.gpus, 3 found by torch" in finding.message


def test_nobody_asks_for_a_gpu() -> None:
    assert one(check_gpus(config(), None)).message == "none asked for"


def test_what_a_failed_sample_costs_is_told_where_it_does_not_cost_its_group() -> None:
    assert list(check_failed_samples(config())) == []
    retried = one(check_failed_samples(config(rollout={"on_failed_sample": "retry"})))
    assert "drawn again up to 1 times, then masked" in retried.message
    assert "favour short ones" in retried.message
    masked = one(check_failed_samples(config(rollout={"on_failed_sample": "mask"})))
    assert "one is masked; a group needs 2 of" in masked.message
