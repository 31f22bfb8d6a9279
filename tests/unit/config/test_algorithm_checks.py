"""Combinations of advantage and loss that cannot work: each says why, and what to set."""

from typing import Any

import pytest

from offbeat.config.crosschecks import clashes
from offbeat.config.run import RunConfig
from offbeat.launch.checks.algorithm import check_kl


def messages(samples: int = 8, filters: dict[str, Any] | None = None, **section: Any) -> list[str]:
    values = {
        "steps": 2,
        "model": {"path": "tiny"},
        "samples_per_group": samples,
        "algorithm": section,
        "filters": filters or {},
    }
    found = clashes(RunConfig.model_validate(values))
    return [f"{clash.message}. {clash.hint}" for clash in found]


CORRECTIONS = [
    ({"tis_cap": 2}, "tis_cap=2"),
    ({"icepop_band": [0.5, 5]}, "icepop_band=[0.5, 5]"),
    ({"sequence_band": [0.9, 1.1]}, "sequence_band=[0.9, 1.1]"),
    ({"sequence_cap": 2}, "sequence_cap=2"),
]


@pytest.mark.parametrize(("loss", "written"), CORRECTIONS)
def test_a_correction_needs_the_trainers_own_logprobs(loss: dict[str, Any], written: str) -> None:
    (text,) = messages(loss=loss)
    assert f"algorithm.loss.{written} has nothing to correct" in text
    assert "Set algorithm.loss.old_logprobs to policy or current" in text
    for own in ("policy", "current"):
        assert not messages(loss={**loss, "old_logprobs": own})


@pytest.mark.parametrize("band", [[5, 0.5], [1, 5], [0.5, 1], [2, 3], [0, 0.5]])
@pytest.mark.parametrize("name", ["icepop_band", "sequence_band"])
def test_a_band_has_to_hold_1(name: str, band: list[float]) -> None:
    (text,) = messages(loss={name: band, "old_logprobs": "current"})
    assert f"algorithm.loss.{name}=" in text
    assert "does not contain 1" in text


def test_a_cap_above_the_band_never_caps() -> None:
    loss = {"old_logprobs": "current", "icepop_band": [0.5, 5], "tis_cap": 5}
    (text,) = messages(loss=loss)
    assert "tis_cap=5 never caps anything" in text
    assert not messages(loss={**loss, "tis_cap": 4.9})


def test_dual_clip_lies_beyond_the_clip_range() -> None:
    (text,) = messages(loss={"dual_clip": 1.2, "clip_high": 0.28})
    assert "dual_clip=1.2 is inside the clip range, which ends at 1.28" in text
    assert not messages(loss={"name": "gspo", "dual_clip": 3})


def test_imitation_needs_no_second_sample() -> None:
    assert not messages(samples=1, loss={"name": "sft"})
    assert messages(samples=1, loss={"name": "gspo"})


def test_tries_leave_a_sample_out() -> None:
    (text,) = messages(samples=4, advantage="pass_at_k", pass_k=4)
    assert "algorithm.pass_k=4 leaves no sample out of samples_per_group=4" in text
    assert not messages(samples=4, advantage="pass_at_k", pass_k=3)
    assert not messages(samples=4, pass_k=9)


MIS = {
    "old_logprobs": "current",
    "sequence_band": [0, 2],
    "sequence_statistic": "product",
    "sequence_weights": True,
}


@pytest.mark.parametrize("without", [{"sequence_band": None}, {"sequence_statistic": "geometric"}])
def test_only_a_bounded_product_weighs_a_sequence(without: dict[str, Any]) -> None:
    (text,) = messages(loss={**MIS, **without})
    assert "algorithm.loss.sequence_weights=true has no weight to give" in text
    assert not messages(loss=MIS)


@pytest.mark.parametrize(("token", "written"), CORRECTIONS[:2])
def test_a_sequence_is_not_corrected_for_twice(token: dict[str, Any], written: str) -> None:
    (text,) = messages(loss={**MIS, **token})
    assert f"sequence_weights=true and algorithm.loss.{written} correct" in text


def test_a_constant_without_a_use_is_refused() -> None:
    (text,) = messages(loss={"constant_tokens": 100})
    assert "constant_tokens=100 is not used: algorithm.loss.normalize=tokens" in text
    assert not messages(loss={"constant_tokens": 100, "normalize": "constant"})
    assert not messages(loss={"normalize": "constant"})


def test_the_deviation_of_a_step_divides_advantages_only() -> None:
    (text,) = messages(loss={"step_std": True, "kl_coef": 0.1})
    assert "algorithm.loss.step_std=true would divide the KL penalty of " in text
    assert not messages(loss={"step_std": True})


def test_a_teacher_gives_a_lone_sample_something_to_learn() -> None:
    assert not messages(samples=1, loss={"teacher": "teacher"})
    (text,) = messages(samples=1, loss={"teacher": "teacher", "teacher_reward_coef": 1})
    assert "a lone sample's advantage is 0" in text
    assert messages(samples=1, loss={})


def test_rewards_that_are_not_trained_drop_no_group_of_a_teacher() -> None:
    alone = {"teacher": "teacher"}
    (text,) = messages(filters={"zero_variance": True}, loss=alone)
    assert "filters.zero_variance=true drops groups by rewards that are not trained" in text
    assert not messages(filters={"zero_variance": True}, loss={**alone, "teacher_reward_coef": 1})


def test_weights_of_a_teacher_that_is_not_there_are_refused() -> None:
    (text,) = messages(loss={"teacher_coef": 0.5})
    assert "algorithm.loss.teacher_coef is not used without algorithm.loss.teacher" in text
    assert not messages(loss={"teacher": "teacher", "teacher_coef": 0.5})


def test_a_teachers_part_is_not_divided_by_the_deviation_of_rewards() -> None:
    (text,) = messages(loss={"teacher": "teacher", "step_std": True})
    assert "algorithm.loss.step_std=true would divide the teacher's part" in text


@pytest.mark.plugins
@pytest.mark.parametrize(("backend", "refused"), [("megatron", True), ("torch", False)])
def test_a_teacher_needs_the_torch_trainer(backend: str, refused: bool) -> None:
    recipe = {
        "steps": 2,
        "model": {"path": "tiny"},
        "trainer": {"backend": backend, "data_parallel": 2},
        "algorithm": {"loss": {"teacher": "teacher"}},
    }
    found = [clash.message for clash in clashes(RunConfig.model_validate(recipe))]
    assert any("needs trainer.backend=torch" in text for text in found) == refused


@pytest.mark.parametrize("beside", [{"tis_cap": 2}, {"icepop_band": [0.5, 5]}, MIS])
def test_a_sequence_cap_is_the_only_weight(beside: dict[str, Any]) -> None:
    (text,) = messages(loss={"old_logprobs": "current", "sequence_cap": 3, **beside})
    assert "sequence_cap=3 and algorithm.loss." in text
    assert "correct for the same difference twice" in text
    beside = {"sequence_band": [0.5, 2], "sequence_statistic": "product"}
    assert not messages(loss={"old_logprobs": "current", "sequence_cap": 2, **beside})


def test_an_unbiased_gradient_is_of_a_penalty_whose_mean_is_the_kl() -> None:
    (text,) = messages(loss={"kl_gradient": "unbiased"})
    assert "kl_gradient=unbiased is not used: algorithm.loss.kl_coef=0" in text
    (text,) = messages(loss={"kl_gradient": "unbiased", "kl_coef": 0.1, "kl_kind": "k2"})
    assert "cannot be combined with algorithm.loss.kl_kind=k2" in text
    for kind in ("k1", "k3"):
        assert not messages(loss={"kl_gradient": "unbiased", "kl_coef": 0.1, "kl_kind": kind})


@pytest.mark.parametrize("key", [{"kl_kind": "k2"}, {"kl_clamp": 10.0}])
def test_keys_of_a_kl_penalty_need_one(key: dict[str, Any]) -> None:
    (text,) = messages(loss=key)
    assert "is not used: algorithm.loss.kl_coef=0" in text
    assert not messages(loss={"kl_coef": 0.1, **key})


@pytest.mark.parametrize(
    ("loss", "warns"),
    [
        ({"kl_coef": 0.1, "kl_kind": "k1"}, True),
        ({"kl_coef": 0.1, "kl_kind": "k1", "kl_gradient": "unbiased"}, False),
        ({"kl_coef": 0.1, "kl_kind": "k2"}, False),
        ({"kl_reward_coef": 0.1}, False),
    ],
)
def test_a_kl_penalty_without_a_gradient_on_average_is_warned_of(
    loss: dict[str, Any], warns: bool
) -> None:
    recipe = {"steps": 1, "model": {"path": "m"}, "algorithm": {"loss": loss}}
    found = [finding.message for finding in check_kl(RunConfig.model_validate(recipe))]
    assert ["is zero on average" in text for text in found] == [True] * warns


def test_a_deviation_divides_advantages_that_cancel_and_nothing_else() -> None:
    (text,) = messages(loss={"entropy_coef": 0.1, "step_std": True})
    assert "would divide the bonus of algorithm.loss.entropy_coef=0.1 too" in text
    (text,) = messages(loss={"kl_reward_coef": 0.1, "step_std": True})
    assert "algorithm.loss.kl_reward_coef=0.1 moves it" in text
    (text,) = messages(advantage="grpo_loo", loss={"step_std": True})
    assert "advantages of algorithm.advantage=grpo_loo do not cancel" in text


@pytest.mark.parametrize("several", ["minibatches", "epochs"])
def test_old_logprobs_of_several_optimizer_steps_are_those_of_their_beginning(several: str) -> None:
    counts: dict[str, Any] = {several: 2}
    (text,) = messages(loss={"old_logprobs": "current"}, **counts)
    assert f"With algorithm.{several}=2, every ratio would be 1" in text
    for own in ("policy", "generation"):
        assert not messages(loss={"old_logprobs": own}, **counts)


@pytest.mark.parametrize("several", ["minibatches", "epochs"])
def test_the_deviation_of_a_step_goes_with_several_optimizer_steps(several: str) -> None:
    counts: dict[str, Any] = {several: 2}
    assert not messages(loss={"step_std": True}, **counts)


def test_every_minibatch_has_a_group() -> None:
    (text,) = messages(minibatches=1000)
    assert "minibatches would have no group" in text
