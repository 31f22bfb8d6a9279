"""Weights of a world: computed with as transformers does, in from a directory, out to one, and to engines."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core", reason="needs the extra megatron")

from megatron_cases import JobStep
from megatron_world import MegatronWorld
from parity_cases import TOKENS, Step
from parity_cases import MegatronCut as Cut
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from offbeat.plugins.float8.trained_pass import as_quantized, has_quantized
from offbeat.plugins.megatron.architecture import read_architecture
from offbeat.plugins.megatron.checks import largest_rank
from offbeat.trainers.torch.logprobs import largest_logprobs
from offbeat.weight_sync import canary
from offbeat.weight_sync.grid import ModelGrid
from tests.support.plain_modules import ModuleReceiver

Models = Callable[[str], Path]


def hf_model(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("qwen3", Cut()),
        ("qwen3", Cut(tensor=2)),
        ("qwen3", Cut(tensor=2, sequence=True)),
        ("qwen3", Cut(pipeline=2)),
        ("qwen3", Cut(tensor=2, pipeline=2)),
        ("qwen3-tied", Cut(pipeline=2)),
        ("qwen2", Cut(tensor=2)),
        ("llama-tied", Cut(tensor=2)),
        ("moe", Cut()),
        ("qwen3", Cut(context=2)),
        ("moe", Cut(tensor=2, expert=2, sequence=True)),
        ("glm4-moe", Cut(tensor=2, expert=2, sequence=True)),
        ("dots1", Cut()),
    ],
    ids=lambda each: (
        each if isinstance(each, str) else f"t{each.tensor}p{each.pipeline}c{each.context}"
    ),
)
def test_log_probabilities_are_those_of_transformers(
    megatron_world: MegatronWorld, models: Models, step: Step, name: str, cut: Cut
) -> None:
    path = models(name)
    model = hf_model(path)
    replies = megatron_world.run(
        cut.ranks,
        "logprobs",
        path=path,
        cut=replace(cut, dtype="float32"),
        step=JobStep.of(step, TOKENS),
        temperature=0.7,
    )
    for group, *columns in zip(step.groups, *replies, strict=True):
        want = plain_logprobs(model, group, 0.7)
        for each in columns:
            np.testing.assert_allclose(each["policy_logprobs"], want, atol=2e-5)
            np.testing.assert_array_equal(each["policy_logprobs"], each["reference_logprobs"])


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("qwen3", Cut()),
        ("qwen3", Cut(tensor=2, sequence=True)),
        ("qwen3-tied", Cut(pipeline=2)),
        ("moe", Cut(data=2, expert=2)),
        ("qwen3", Cut(context=2)),
    ],
    ids=lambda each: (
        each if isinstance(each, str) else f"t{each.tensor}p{each.pipeline}c{each.context}"
    ),
)
def test_next_token_logprobs_are_those_of_transformers(
    megatron_world: MegatronWorld, models: Models, name: str, cut: Cut
) -> None:
    path, prompts = models(name), canary.prompts(63)
    with torch.no_grad():
        logits = hf_model(path)(torch.tensor(prompts)).logits[:, -1]
    tokens, logprobs = largest_logprobs(logits, 8)
    for got in megatron_world.run(
        cut.ranks, "top_logprobs", path=path, cut=replace(cut, dtype="float32"), prompts=prompts
    ):
        assert got[0] == tokens
        np.testing.assert_allclose(got[1], logprobs, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "cut"),
    [("qwen3", Cut(tensor=2)), ("qwen3", Cut(pipeline=2)), ("moe", Cut(data=2, expert=2))],
    ids=["t2", "p2", "e2"],
)
def test_next_token_logprobs_of_quantized_matrices_are_those_of_one_module(
    megatron_world: MegatronWorld, models: Models, name: str, cut: Cut
) -> None:
    path, prompts = models(name), canary.prompts(63)
    model = hf_model(path)
    with torch.no_grad():
        plain = model(torch.tensor(prompts)).logits[:, -1].log_softmax(-1)
        for place, each in model.named_parameters():
            if has_quantized(place, tuple(each.shape)):
                each.copy_(as_quantized(place, each))
        logits = model(torch.tensor(prompts)).logits[:, -1]
    assert float((logits.log_softmax(-1) - plain).abs().max()) > 1e-3, "rounding is seen"
    tokens, logprobs = largest_logprobs(logits, 8)
    for got, stays in megatron_world.run(
        cut.ranks,
        "quantized_logprobs",
        path=path,
        cut=replace(cut, dtype="float32"),
        prompts=prompts,
    ):
        assert stays
        assert got[0] == tokens
        np.testing.assert_allclose(got[1], logprobs, atol=2e-5)


def plain_logprobs(model: Any, group: dict[str, Any], temperature: float) -> Any:
    """One unpadded sequence at a time."""
    values = list[Any]()
    offsets, prompt = group["response_offsets"], group["prompt_ids"]
    for start, end in pairwise(offsets):
        ids = torch.tensor(np.concatenate([prompt, group["response_ids"][start:end]])).long()
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0]
        every = torch.log_softmax(logits / temperature, -1)
        places = torch.arange(len(prompt) - 1, len(ids) - 1)
        values.append(every[places, ids[len(prompt) :]].numpy())
    return np.concatenate(values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3-tied", "qwen2", "llama-tied", "moe", "qwen2-moe", "glm4-moe"]
)
def test_weights_come_out_as_they_went_in(
    megatron_world: MegatronWorld, models: Models, tmp_path: Path, name: str, dtype: str
) -> None:
    path = models(name)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    want = {n: each.float().numpy() for n, each in saved_names(model, tmp_path / "hf").items()}
    has_experts = "moe" in name
    is_odd = model.config.num_hidden_layers % 2
    cuts = [Cut(), Cut(pipeline=2, stages=(2, 1) if is_odd else None)]
    cuts += [Cut(tensor=2, sequence=has_experts)]
    if has_experts:
        cuts += [Cut(data=2, expert=2), Cut(tensor=2, expert=2, sequence=True)]
        cuts += [Cut(tensor=2, expert_tensor=2, sequence=True)]
    else:
        cuts += [Cut(tensor=2, pipeline=2), Cut(context=2)]
    digests = set[str]()
    for index, cut in enumerate(cuts):
        target = tmp_path / str(index)
        for weights, digest, parameters in megatron_world.run(
            cut.ranks, "exported", path=path, cut=replace(cut, dtype=dtype), target=target
        ):
            assert weights.keys() == want.keys()
            assert all((weights[n] == want[n]).all() for n in want)
            assert parameters == sum(each.numel() for each in model.parameters())
            digests.add(digest)
        again = saved_names(hf_model(target), tmp_path / f"again{index}")
        assert all((again[n].float().numpy() == want[n]).all() for n in want)
        assert (target / "tokenizer.json").exists()
    assert len(digests) == 1, "the digest depends on the layout"


@pytest.mark.parametrize("name", ["qwen3-tied", "moe"])
def test_several_files_of_any_layout_are_equal_and_transformers_loads_them(
    megatron_world: MegatronWorld, models: Models, tmp_path: Path, name: str
) -> None:
    want = saved_names(hf_model(models(name)), tmp_path / "hf")
    targets = list[Path]()
    for cut in (Cut(dtype="float32"), Cut(dtype="float32", tensor=2, sequence=True)):
        targets.append(tmp_path / f"{len(targets)}")
        given = {"path": models(name), "cut": cut, "target": targets[-1], "file_bytes": 20_000}
        megatron_world.run(cut.ranks, "exported", **given)
    one, two = ({each.name: each.read_bytes() for each in path.iterdir()} for path in targets)
    assert one == two
    assert len([each for each in one if each.endswith(".safetensors")]) > 4
    again = saved_names(hf_model(targets[1]), tmp_path / "again")
    assert again.keys() == want.keys()
    assert all(torch.equal(again[each], want[each]) for each in want)


def saved_names(model: Any, directory: Path) -> dict[str, torch.Tensor]:
    """The tensors as transformers writes them: experts one by one."""
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


# --- to engines -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("qwen3-tied", Cut()),
        ("qwen3-tied", Cut(tensor=2)),
        ("qwen3-tied", Cut(pipeline=2, data=2)),
        ("moe", Cut(data=2, expert=2)),
        ("moe", Cut(tensor=2, expert=2, sequence=True)),
        ("qwen3-3", Cut(pipeline=2, stages=(2, 1))),
        ("qwen3-tied", Cut(context=2)),
        ("glm4-moe", Cut(data=2, expert=2, moe={"bias_update_rate": 0.2})),
    ],
    ids=["1", "t2", "p2d2", "moe-e2", "moe-t2e2", "p2-uneven", "c2", "sigmoid-e2"],
)
def test_an_embedded_engine_computes_with_the_weights_it_received(
    megatron_world: MegatronWorld,
    models: Models,
    step: Step,
    tmp_path: Path,
    name: str,
    cut: Cut,
) -> None:
    """The engine is a module of transformers: it holds the experts of a layer in two tensors."""
    (release, *_) = megatron_world.run(
        cut.ranks,
        "released",
        path=models(name),
        cut=replace(cut, dtype="float32"),
        step=JobStep.of(step, TOKENS),
        generator="embedded",
        target=tmp_path / "trained",
    )
    manifest, chunks, digest = release
    assert len(chunks) > 1
    served, trained = hf_model(models(name)), hf_model(tmp_path / "trained")
    receiver = ModuleReceiver(served)
    receiver.begin(1, manifest)
    for index, chunk in enumerate(chunks):
        assert receiver.apply(1, index, chunk)
    receiver.verify(digest)
    receiver.commit(1)
    ids = torch.tensor(step.groups[0]["response_ids"]).long()[None]
    with torch.no_grad():
        assert torch.equal(served(input_ids=ids).logits, trained(input_ids=ids).logits)
        assert not torch.equal(
            served(input_ids=ids).logits, hf_model(models(name))(input_ids=ids).logits
        )


@pytest.mark.parametrize("model", ["moe", "dots1"])
def test_a_vllm_engine_is_sent_the_names_of_the_models_files(
    megatron_world: MegatronWorld, models: Models, step: Step, tmp_path: Path, model: str
) -> None:
    path = models(model)
    ((manifest, *_), *_) = megatron_world.run(
        2,
        "released",
        path=path,
        cut=Cut(data=2, expert=2, dtype="float32"),
        step=JobStep.of(step, TOKENS),
        generator="vllm",
        target=tmp_path / "trained",
    )
    held = load_file(path / "model.safetensors")
    assert {spec.name: tuple(spec.shape) for spec in manifest.tensors} == {
        name: tuple(tensor.shape) for name, tensor in held.items()
    }


@pytest.mark.parametrize(
    ("model", "cut"),
    [
        ("qwen2", Cut(tensor=2)),
        ("qwen3-3", Cut(pipeline=2, stages=(2, 1), dtype="bfloat16")),
        ("qwen3-tied", Cut(pipeline=2, dtype="float32")),
        ("moe", Cut(tensor=2, expert=2, sequence=True, dtype="float32")),
        ("moe", Cut(tensor=2, expert_tensor=2, sequence=True, dtype="float32")),
        ("qwen2-moe", Cut(tensor=2, expert=2, sequence=True)),
        ("glm4-moe", Cut(pipeline=2, stages=(1, 2), dtype="bfloat16")),
    ],
    ids=["t2", "p2 of 2 + 1", "p2 tied", "t2e2", "t2et2", "shared", "sigmoid"],
)
def test_a_rank_holds_the_bytes_that_are_declared(
    megatron_world: MegatronWorld, models: Models, step: Step, model: str, cut: Cut
) -> None:
    grid = ModelGrid(
        tensor=cut.tensor,
        pipeline=cut.pipeline,
        expert=cut.expert,
        expert_tensor=cut.expert_tensor,
        stages=cut.stages or (),
    )
    job_step = JobStep.of(step, TOKENS)
    replies = megatron_world.run(cut.ranks, "held", path=models(model), cut=cut, step=job_step)
    assert all(declared == shapes for declared, shapes, _ in replies)
    largest = largest_rank(
        read_architecture(models(model)),
        grid,
        cut.dtype,  # pyright: ignore[reportArgumentType] -- of the recipe's dtypes
        sharded=False,
    )
    assert max((each for *_, each in replies), key=lambda each: each.total) == largest


@pytest.mark.parametrize(
    ("model", "cut"),
    [
        ("qwen3", Cut(tensor=2, data=2)),
        ("qwen3", Cut(pipeline=2, data=2)),
        ("qwen3", Cut(context=2, data=2)),
        ("moe", Cut(tensor=2, data=2, expert=4, sequence=True)),
        ("moe", Cut(tensor=2, context=2, expert=2, sequence=True)),
    ],
    ids=["t2d2", "p2d2", "c2d2", "t2d2e4", "t2c2e2"],
)
def test_the_driver_numbers_the_ranks_as_the_library_does(
    megatron_world: MegatronWorld, models: Models, model: str, cut: Cut
) -> None:
    for driver, own, library in megatron_world.run(
        cut.ranks, "places", path=models(model), cut=cut
    ):
        assert driver == (own["data"], own["leader"])
        assert own == library


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("qwen3", Cut(tensor=2)),
        ("qwen3-tied", Cut(pipeline=2)),
        ("moe", Cut(data=2, expert=2)),
        ("qwen3", Cut(tensor=2, pipeline=2)),
        ("glm4-moe", Cut(data=2, expert=2, dtype="bfloat16")),
        ("qwen3-3", Cut(pipeline=2, stages=(2, 1))),
        ("moe", Cut(tensor=2, expert=2, sequence=True)),
        ("moe", Cut(tensor=2, expert_tensor=2, sequence=True)),
        ("moe", Cut(tensor=2, data=2, expert=4, sequence=True)),
    ],
    ids=[
        "tp2",
        "pp2",
        "ep2",
        "tp2pp2",
        "sigmoid",
        "pp2 of 2 + 1",
        "tp2ep2",
        "tp2etp2",
        "one expert a rank",
    ],
)
def test_sharded_receivers_get_what_a_broadcast_sends_from_the_ranks_that_hold_it(
    megatron_world: MegatronWorld, models: Models, name: str, cut: Cut
) -> None:
    answers = megatron_world.run(cut.ranks, "sent", path=models(name), cut=cut)
    assert [same for same, _ in answers] == [True] * cut.ranks
    assert all(nbytes for _, nbytes in answers[:2])
