"""A step on groups whose prompts have pictures is the step of one plain sample after another."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.loss import ClippedPgLossConfig
from offbeat.messages.fences import StepKey
from offbeat.messages.media import get_media
from offbeat.plugins.images.pictures import Pictures
from offbeat.trainers.errors import UnfitColumns, UntrainableModel
from offbeat.trainers.torch.proof import prove_rows
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.support.image_text_models import (
    PLACEHOLDER,
    HalvesPictures,
    exact_norms,
    logprobs_with_features_in_the_prompt_alone,
    make,
    native_inputs,
    picture_groups,
    pictures,
    plain_logprobs,
)
from tests.support.pictures import pixels
from tests.support.random_groups import Group
from tests.support.split_steps import MakeTrainer, Step, naive_gradients, raw_gradients

FULL = LossSpec(
    ClippedPgLossConfig(
        old_logprobs="policy", tis_cap=2.0, kl_coef=0.1, clip_low=0.4, clip_high=0.6
    )
)
TOWER = ("model.vision_model.*", "model.connector.*")


def step_of(family: str) -> Step:
    """Eight groups, with one picture, two, or none."""
    groups = picture_groups((1, 2, 0, 1) * 2, family=family)
    rng = np.random.default_rng(1)
    return groups, [tuple(rng.normal(0, 1, 3).tolist()) for _ in groups]


@pytest.fixture(scope="module")
def step() -> Step:
    return step_of("idefics3")


@pytest.mark.parametrize("shared_prompt", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("freeze", [(), TOWER], ids=["trained tower", "frozen tower"])
def test_the_gradient_is_that_of_one_plain_sample_after_another(
    trainer_of: MakeTrainer,
    idefics3: Path,
    step: Step,
    shared_prompt: bool,
    freeze: tuple[str, ...],
) -> None:
    options: dict[str, Any] = {"shared_prompt": shared_prompt, "freeze": freeze}
    trainer = trainer_of(idefics3, max_tokens_per_microbatch=100, **options)
    model: Any = exact_norms(trainer.module)
    want = naive_gradients(
        trainer, step, FULL, lambda group, row: native_inputs(model, row, get_media(group))
    )
    is_frozen = {name.startswith("model.text_model") or name == "lm_head.weight" for name in want}
    assert is_frozen == ({True} if freeze else {True, False})
    for attempt, chunks in enumerate((1, 2, 8), start=1):
        got = raw_gradients(trainer, step, FULL, chunks, attempt)
        assert error(got, want) <= 1e-10


@pytest.mark.parametrize("shared_prompt", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize(
    ("family", "bound"),
    [("qwen2_5_vl", 1e-7), ("qwen3_vl", 1e-7), ("gemma3", 1e-10)],  # Qwen's angles are float32
)
def test_axes_deeper_features_and_opened_attention_give_the_gradient_of_plain_samples(
    trainer_of: MakeTrainer, tmp_path: Path, family: str, bound: float, shared_prompt: bool
) -> None:
    make(family).save_pretrained(tmp_path)
    step, options = step_of(family), {"shared_prompt": shared_prompt}
    trainer = trainer_of(tmp_path, max_tokens_per_microbatch=100, **options)
    model: Any = exact_norms(trainer.module)
    want = naive_gradients(
        trainer, step, FULL, lambda group, row: native_inputs(model, row, get_media(group))
    )
    got = raw_gradients(trainer, step, FULL, 2)
    assert error(got, want) <= bound


def error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Largest difference of any gradient, over the largest: that of a key's bias is zero."""
    assert got.keys() == want.keys()
    largest = max(float(each.abs().max()) for each in want.values())
    return max(float((got[name] - want[name]).abs().max()) for name in want) / largest


def test_a_sampled_placeholder_is_a_token_and_gets_no_feature(
    trainer_of: MakeTrainer, idefics3: Path, step: Step
) -> None:
    group = dict(step[0][0])
    group["response_ids"] = group["response_ids"].copy()
    group["response_ids"][::2] = PLACEHOLDER
    trainer = trainer_of(idefics3)
    (columns,) = trainer.prepare_logprobs(
        build_chunk([group]), policy=True, reference=False, temperature=1.0
    )
    offsets, model = group["response_offsets"], exact_norms(trainer.module)
    media = get_media(group)
    assert media is not None
    for first, end in itertools.pairwise(offsets):
        response = group["response_ids"][first:end].tolist()
        prompt = group["prompt_ids"].tolist()
        with torch.no_grad():
            want = logprobs_with_features_in_the_prompt_alone(model, prompt, response, media)
        np.testing.assert_allclose(columns["policy_logprobs"][first:end], want, atol=2e-6, rtol=0)


def test_policy_and_reference_score_samples_behind_their_own_pictures(
    trainer_of: MakeTrainer, idefics3: Path, step: Step
) -> None:
    groups, _ = step
    trainer = trainer_of(idefics3)
    made = trainer.prepare_logprobs(
        build_chunk(groups), policy=True, reference=True, temperature=1.0
    )
    model = exact_norms(trainer.module)
    for group, columns in zip(groups, made, strict=True):
        offsets, prompt = group["response_offsets"], group["prompt_ids"].tolist()
        for first, end in itertools.pairwise(offsets):
            response = group["response_ids"][first:end].tolist()
            with torch.no_grad():
                want = plain_logprobs(model, prompt, response, get_media(group))
            for name in ("policy_logprobs", "reference_logprobs"):
                np.testing.assert_allclose(columns[name][first:end], want, atol=2e-6, rtol=0)


def test_the_tower_computes_the_pictures_of_a_group_once_for_all_its_samples(
    trainer_of: MakeTrainer, idefics3: Path, step: Step
) -> None:
    trainer, computed = trainer_of(idefics3, max_tokens_per_microbatch=10_000), list[int]()
    tower: Any = trainer.module
    tower.model.vision_model.register_forward_hook(
        lambda _module, _args, output: computed.append(len(output[0]))
    )
    trainer.prepare_logprobs(build_chunk(step[0]), policy=True, reference=False, temperature=1.0)
    pictures_of_groups = [get_media(group) for group in step[0]]
    assert sum(computed) == sum(len(Pictures.of(each).sizes) for each in pictures_of_groups if each)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (pixels((3, 16, 16)), "picture 0 of \\[3, 16, 16\\]"),
        (pictures(0, 2), "has 4 placeholder tokens, but its pictures take 8"),
        ({"media_values": np.zeros(3 * 32 * 32, np.float32)}, "picture 0 of zeros"),
    ],
)
def test_a_group_whose_pictures_do_not_fit_its_prompt_is_unfit_and_named(
    trainer_of: MakeTrainer, idefics3: Path, step: Step, changes: Group, problem: str
) -> None:
    groups = [step[0][1], step[0][0] | changes]
    with pytest.raises(UnfitColumns, match=problem) as raised:
        trainer_of(idefics3).prepare_logprobs(
            build_chunk(groups), policy=True, reference=False, temperature=1
        )
    assert raised.value.place == 1


def test_placeholders_of_a_prompt_without_pictures_are_not_trained_as_text(
    trainer_of: MakeTrainer, idefics3: Path, step: Step
) -> None:
    """Answers in the prompts of an agent's branches may have the token: such groups are trained."""
    trainer, spec = trainer_of(idefics3), LossSpec(ClippedPgLossConfig())
    groups, advantages = step
    bare = {name: each for name, each in groups[0].items() if not name.startswith("media_")}
    branches = np.arange(len(bare["response_offsets"]) - 1, dtype=np.int32)
    trainer.begin_train_step(StepKey(1, 1, 0), spec)
    with pytest.raises(UnfitColumns, match=r"a placeholder of pictures, at index") as raised:
        trainer.train_microbatch(StepKey(1, 1, 1), build_chunk([groups[1], bare]), advantages[:2])
    assert raised.value.place == 1
    trainer.abort_train_step(StepKey(1, 1, 1))
    trainer.begin_train_step(StepKey(1, 2, 0), spec)
    branched = bare | {"branch_samples": branches}
    trainer.train_microbatch(StepKey(1, 2, 1), build_chunk([branched]), advantages[:1])
    assert trainer.finish_train_step(StepKey(1, 2, 2)).applied


def test_a_text_model_refuses_a_group_with_pictures(trainer_of: MakeTrainer, step: Step) -> None:
    with pytest.raises(UnfitColumns, match="the model reads only text"):
        trainer_of().prepare_logprobs(
            build_chunk(step[0][:1]), policy=True, reference=False, temperature=1
        )


def test_a_model_that_computes_pictures_otherwise_is_refused_at_the_start() -> None:
    model = HalvesPictures(make("idefics3").config).eval()
    model.load_state_dict(make("idefics3").state_dict())
    with pytest.raises(UntrainableModel, match=r"behind pictures that are off by"):
        prove_rows(model, 64, shared_prompt=True, dtype=torch.float32)
