"""megatron-core's step against the torch trainer's, over gloo worlds of 1, 2 and 4 ranks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core", reason="needs the extra megatron")

from megatron_cases import Cut, Outcome
from megatron_cases import Step as JobStep
from megatron_reference import (
    BY_SEQUENCES,
    FULL,
    Step,
    hf_model,
    reference,
    torch_step,
    worst_relative_error,
)
from megatron_world import MegatronWorld
from safetensors.torch import load_file

Models = Callable[[str], Path]
TIGHT = 1e-12
"""Largest relative error in float64. Measured: 6e-15."""
EXPERTS = 1e-5
"""The same with experts: both sides round the router to float32."""
LAYOUTS = {
    "one-rank": Cut(),
    "data2": Cut(data=2),
    "tensor2": Cut(tensor=2),
    "pipeline2": Cut(pipeline=2),
    "tensor2-data2": Cut(tensor=2, data=2),
    "pipeline2-data2": Cut(pipeline=2, data=2),
    "tensor2-pipeline2": Cut(tensor=2, pipeline=2),
    "data2-overlap": Cut(data=2, overlap=True),
}
LOSSES = {"tokens": FULL, "sequences": BY_SEQUENCES}


def check(outcomes: Sequence[Outcome], want: Outcome, tolerance: float = TIGHT) -> None:
    for each in outcomes:
        assert each.in_step, "replicas or tied copies differ"
        assert worst_relative_error(each.gradients, want.gradients) <= tolerance
        got, wanted = each.result, want.result
        assert (got.applied, got.tokens, got.sequences) == (True, wanted.tokens, wanted.sequences)
        assert got.loss == pytest.approx(wanted.loss, rel=tolerance)
        assert got.grad_norm == pytest.approx(wanted.grad_norm, rel=tolerance)
        assert got.learning_rate == wanted.learning_rate
        assert got.metrics == pytest.approx(wanted.metrics, rel=max(tolerance, 1e-6))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
@pytest.mark.parametrize("cut", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_step_in_any_chunks_under_any_layout_is_the_torch_trainers(
    megatron_world: MegatronWorld, models: Models, step_data: Step, cut: Cut, loss: Any
) -> None:
    path = models("qwen3")
    want = torch_step(path, step_data, loss)
    step = JobStep(*step_data, loss)
    for outcomes in megatron_world.run(
        cut.ranks, "split", path=path, cut=cut, step=step, chunks=(1, 2, 8)
    ):
        check(outcomes, want)


@pytest.mark.parametrize("cut", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_split_step_and_the_single_shot_move_the_weights_alike(
    megatron_world: MegatronWorld, models: Models, step_data: Step, cut: Cut
) -> None:
    step, path = JobStep(*step_data, FULL), models("qwen3")
    singles = megatron_world.run(cut.ranks, "single", path=path, cut=cut, step=step)
    splits = megatron_world.run(cut.ranks, "split", path=path, cut=cut, step=step, chunks=(3,))
    for one, (several,) in zip(singles, splits, strict=True):
        check([several], one)
        assert worst_relative_error(several.weights, one.weights) <= TIGHT


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("qwen3-tied", Cut(pipeline=2)),
        ("qwen3-tied", Cut(pipeline=2, tensor=2)),
        ("llama", Cut(tensor=2)),
        ("qwen2", Cut(tensor=2)),
        ("qwen2", Cut(pipeline=2)),
        ("qwen2", Cut(shared_prompt=False, max_tokens=40)),
    ],
    ids=lambda each: each if isinstance(each, str) else f"t{each.tensor}p{each.pipeline}",
)
def test_every_family_and_tied_embeddings_train_alike(
    megatron_world: MegatronWorld, models: Models, step_data: Step, name: str, cut: Cut
) -> None:
    path = models(name)
    want = torch_step(path, step_data, FULL)
    step = JobStep(*step_data, FULL)
    for outcomes in megatron_world.run(
        cut.ranks, "split", path=path, cut=cut, step=step, chunks=(2,)
    ):
        check(outcomes, want)


@pytest.mark.parametrize("cut", [Cut(tensor=2, data=2), Cut(pipeline=2)], ids=["t2d2", "p2"])
def test_three_clipped_steps_of_a_warm_up_end_at_the_torch_trainers_weights(
    megatron_world: MegatronWorld, models: Models, step_data: Step, cut: Cut
) -> None:
    path = models("qwen3-tied")
    # Without a large eps, Adam's first steps are signs of the gradient: they would hide its scale.
    options = {
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "schedule": "linear",
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "eps": 1e-2,
    }
    trainer = reference(path, **options)
    wanted = [trainer.train(*step_data, FULL) for _ in range(3)]
    weights = {name: each.numpy() for name, each in trainer.named_weights()}
    assert wanted[0].grad_norm > 0.5, "nothing was clipped"
    step = JobStep(*step_data, FULL)
    for outcomes in megatron_world.run(
        cut.ranks, "steps", path=path, cut=replace(cut, optimizer=options), step=step, count=3
    ):
        for got, want in zip(outcomes, wanted, strict=True):
            assert got.result.learning_rate == want.learning_rate
            assert got.result.grad_norm == pytest.approx(want.grad_norm, rel=TIGHT)
            assert got.in_step
        assert worst_relative_error(outcomes[-1].weights, weights) <= TIGHT


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("qwen3", Cut()),
        ("qwen3", Cut(tensor=2)),
        ("qwen3", Cut(pipeline=2)),
        ("qwen3", Cut(tensor=2, pipeline=2)),
        ("qwen3-tied", Cut(pipeline=2)),
        ("qwen2", Cut(tensor=2)),
        ("llama", Cut(tensor=2)),
    ],
    ids=lambda each: each if isinstance(each, str) else f"t{each.tensor}p{each.pipeline}",
)
def test_log_probabilities_are_those_of_transformers(
    megatron_world: MegatronWorld, models: Models, step_data: Step, name: str, cut: Cut
) -> None:
    path = models(name)
    model = hf_model(path)
    replies = megatron_world.run(
        cut.ranks,
        "logprobs",
        path=path,
        cut=replace(cut, dtype="float32"),
        step=JobStep(*step_data, FULL),
        temperature=0.7,
    )
    for group, *columns in zip(step_data[0], *replies, strict=True):
        want = plain_logprobs(model, group, 0.7)
        for each in columns:
            np.testing.assert_allclose(each["policy_logprobs"], want, atol=2e-5)
            np.testing.assert_array_equal(each["policy_logprobs"], each["reference_logprobs"])


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
@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied", "qwen2", "llama", "moe"])
def test_weights_come_out_as_they_went_in(
    megatron_world: MegatronWorld, models: Models, tmp_path: Path, name: str, dtype: str
) -> None:
    path = models(name)
    model = hf_model(path).to(getattr(torch, dtype))
    want = {n: each.float().numpy() for n, each in saved_names(model, tmp_path / "hf").items()}
    cuts = [Cut(), Cut(pipeline=2)]
    cuts += [Cut(data=2, expert=2)] if name == "moe" else [Cut(tensor=2), Cut(tensor=2, pipeline=2)]
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


def saved_names(model: Any, directory: Path) -> dict[str, torch.Tensor]:
    """The tensors as transformers writes them: experts one by one."""
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize(
    "cut",
    [Cut(), Cut(data=2, expert=2), Cut(data=2), Cut(pipeline=2), Cut(data=4, expert=2)],
    ids=["one-rank", "expert2", "data2", "pipeline2", "data4-expert2"],
)
def test_experts_train_as_in_the_torch_trainer(
    megatron_world: MegatronWorld, models: Models, step_data: Step, cut: Cut
) -> None:
    path = models("moe")
    want = torch_step(path, step_data, FULL)
    step = JobStep(*step_data, FULL)
    for outcomes in megatron_world.run(
        cut.ranks, "split", path=path, cut=cut, step=step, chunks=(1, 2, 8)
    ):
        check(outcomes, want, tolerance=EXPERTS)
