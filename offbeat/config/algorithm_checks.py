"""Finds settings of ``algorithm`` that cannot work together, and says what to set instead."""

from collections.abc import Iterator

from offbeat.config.clash import Clash
from offbeat.config.run import RunConfig
from offbeat.config.sections.loss import (
    AnyLossConfig,
    PessimisticLossConfig,
    PolicyGradientLossConfig,
)
from offbeat.config.trainer_backends import CORE_BACKENDS

_LOSS = "algorithm.loss"


def algorithm_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield everything about advantage and loss that cannot work."""
    loss = config.algorithm.loss
    if isinstance(loss, PolicyGradientLossConfig):
        yield from _corrections_have_something_to_correct(loss)
        yield from _bands_hold_what_is_on_policy(loss)
        yield from _the_cap_is_inside_the_band(loss)
        yield from _a_sequence_has_one_weight(loss)
        yield from _the_kl_has_one_gradient(loss)
        yield from _a_deviation_divides_advantages_only(config, loss)
        yield from _a_teacher_has_a_place(config, loss)
        yield from _old_logprobs_outlast_a_minibatch(config, loss)
    if isinstance(loss, PessimisticLossConfig):
        yield from _dual_clip_is_outside_the_clip_range(loss)
    yield from _a_kl_penalty_is_there(loss)
    yield from _a_constant_has_a_use(loss)
    yield from _tries_leave_one_out(config)
    yield from _minibatches_have_groups(config)


def _corrections(loss: PolicyGradientLossConfig) -> dict[str, str]:
    """The corrections that are on, as they are written."""
    caps = {"tis_cap": loss.tis_cap, "sequence_cap": loss.sequence_cap}
    written = {name: f"{cap:g}" for name, cap in caps.items() if cap is not None}
    return written | {name: _written(band) for name, band in _bands(loss)}


def _bands(loss: PolicyGradientLossConfig) -> list[tuple[str, tuple[float, float]]]:
    bands = {"icepop_band": loss.icepop_band, "sequence_band": loss.sequence_band}
    return [(name, band) for name, band in bands.items() if band is not None]


def _written(band: tuple[float, float]) -> str:
    return f"[{band[0]:g}, {band[1]:g}]"


def _corrections_have_something_to_correct(loss: PolicyGradientLossConfig) -> Iterator[Clash]:
    for name, value in _corrections(loss).items():
        if loss.old_logprobs == "generation":
            yield Clash(
                (f"{_LOSS}.{name}", f"{_LOSS}.old_logprobs"),
                f"{_LOSS}.{name}={value} has nothing to correct with "
                f"{_LOSS}.old_logprobs={loss.old_logprobs}: it weighs by exp(old - generation logprob), "
                "which is 1",
                f"Set {_LOSS}.old_logprobs to policy or current, or leave {_LOSS}.{name} out.",
            )


def _bands_hold_what_is_on_policy(loss: PolicyGradientLossConfig) -> Iterator[Clash]:
    for name, band in _bands(loss):
        if not band[0] < 1 < band[1]:
            yield Clash(
                (f"{_LOSS}.{name}",),
                f"{_LOSS}.{name}={_written(band)} does not hold 1: it would drop exactly what the engine "
                "and the trainer agree on",
                "Write the lower bound first, under 1, and the upper one over 1, as in [0.5, 5].",
            )


def _the_cap_is_inside_the_band(loss: PolicyGradientLossConfig) -> Iterator[Clash]:
    cap, band = loss.tis_cap, loss.icepop_band
    if cap is not None and band is not None and cap >= band[1]:
        yield Clash(
            (f"{_LOSS}.tis_cap", f"{_LOSS}.icepop_band"),
            f"{_LOSS}.tis_cap={cap:g} never caps anything: {_LOSS}.icepop_band={_written(band)} drops "
            "a token before its weight gets there",
            f"Set {_LOSS}.tis_cap to less than {band[1]:g}, or leave it out.",
        )


def _dual_clip_is_outside_the_clip_range(loss: PessimisticLossConfig) -> Iterator[Clash]:
    dual = loss.dual_clip
    if dual is not None and dual <= 1 + loss.clip_high:
        yield Clash(
            (f"{_LOSS}.dual_clip", f"{_LOSS}.clip_high"),
            f"{_LOSS}.dual_clip={dual:g} is inside the clip range, which ends at "
            f"{1 + loss.clip_high:g}: it would stop tokens that have not moved far",
            f"Set {_LOSS}.dual_clip to more than {1 + loss.clip_high:g}; 3 is a usual choice.",
        )


def _a_sequence_has_one_weight(loss: PolicyGradientLossConfig) -> Iterator[Clash]:
    by_token = {
        name: value
        for name, value in _corrections(loss).items()
        if name in ("tis_cap", "icepop_band")
    }
    weights = {"sequence_weights": "true"} if loss.sequence_weights else {}
    for name, value in (by_token | weights).items() if loss.sequence_cap is not None else ():
        yield Clash(
            (f"{_LOSS}.sequence_cap", f"{_LOSS}.{name}"),
            f"{_LOSS}.sequence_cap={loss.sequence_cap:g} and {_LOSS}.{name}={value} correct for the same "
            "difference twice",
            "Leave one of them out.",
        )
    if not loss.sequence_weights:
        return
    if loss.sequence_band is None or loss.sequence_statistic != "product":
        yield Clash(
            (f"{_LOSS}.sequence_weights", f"{_LOSS}.sequence_band"),
            f"{_LOSS}.sequence_weights=true has no weight to give: the importance weight of a sequence is "
            "the product of its tokens', and only a band bounds it",
            f"Set {_LOSS}.sequence_statistic to product and {_LOSS}.sequence_band to its bounds, as in "
            f"[0, 2], or leave {_LOSS}.sequence_weights out.",
        )
    for name, value in by_token.items():
        yield Clash(
            (f"{_LOSS}.sequence_weights", f"{_LOSS}.{name}"),
            f"{_LOSS}.sequence_weights=true and {_LOSS}.{name}={value} correct for the same difference "
            "twice: by sequence and by token",
            "Leave one of them out.",
        )


def _the_kl_has_one_gradient(loss: PolicyGradientLossConfig) -> Iterator[Clash]:
    if loss.kl_gradient == "unbiased" and loss.kl_coef and loss.kl_kind == "k2":
        yield Clash(
            (f"{_LOSS}.kl_gradient", f"{_LOSS}.kl_kind"),
            f"{_LOSS}.kl_gradient=unbiased does not go with {_LOSS}.kl_kind=k2: the mean of k2 is "
            "not the KL, and its own gradient already pulls as the KL does",
            f"Set {_LOSS}.kl_kind to k3, or {_LOSS}.kl_gradient to estimator.",
        )


def _a_kl_penalty_is_there(loss: AnyLossConfig) -> Iterator[Clash]:
    changed = loss.model_dump(include={"kl_kind", "kl_clamp", "kl_gradient"}, exclude_defaults=True)
    for name, value in changed.items() if not loss.kl_coef else ():
        yield Clash(
            (f"{_LOSS}.{name}", f"{_LOSS}.kl_coef"),
            f"{_LOSS}.{name}={value} is not used: {_LOSS}.kl_coef=0",
            f"Set {_LOSS}.kl_coef to more than 0, or leave {_LOSS}.{name} out.",
        )


def _a_constant_has_a_use(loss: AnyLossConfig) -> Iterator[Clash]:
    if loss.constant_tokens is not None and loss.normalize != "constant":
        yield Clash(
            (f"{_LOSS}.constant_tokens", f"{_LOSS}.normalize"),
            f"{_LOSS}.constant_tokens={loss.constant_tokens} is not used: {_LOSS}.normalize="
            f"{loss.normalize}",
            f"Set {_LOSS}.normalize to constant, or leave {_LOSS}.constant_tokens out.",
        )


def _a_deviation_divides_advantages_only(
    config: RunConfig, loss: PolicyGradientLossConfig
) -> Iterator[Clash]:
    """Refuse ``step_std`` for other losses.

    It is known when the step is complete, and divides its whole gradient.
    """
    if not loss.step_std:
        return
    if loss.kl_coef:
        yield Clash(
            (f"{_LOSS}.step_std", f"{_LOSS}.kl_coef"),
            f"{_LOSS}.step_std=true would divide the KL penalty of {_LOSS}.kl_coef={loss.kl_coef:g} too: "
            "the deviation is known only when the gradients of both have been added up",
            f"Set {_LOSS}.kl_coef to 0, or {_LOSS}.step_std to false.",
        )
    if loss.kl_reward_coef:
        yield Clash(
            (f"{_LOSS}.step_std", f"{_LOSS}.kl_reward_coef"),
            f"{_LOSS}.step_std=true takes the mean of the step's advantages to be 0, and "
            f"{_LOSS}.kl_reward_coef={loss.kl_reward_coef:g} moves it",
            f"Set {_LOSS}.kl_reward_coef to 0, or {_LOSS}.step_std to false.",
        )
    if loss.entropy_coef:
        yield Clash(
            (f"{_LOSS}.step_std", f"{_LOSS}.entropy_coef"),
            f"{_LOSS}.step_std=true would divide the bonus of {_LOSS}.entropy_coef="
            f"{loss.entropy_coef:g} too",
            f"Set {_LOSS}.entropy_coef to 0, or {_LOSS}.step_std to false.",
        )
    advantage, is_custom = config.algorithm.advantage, config.algorithm.advantage_target is not None
    if is_custom or advantage == "grpo_loo":
        yield Clash(
            (f"{_LOSS}.step_std", "algorithm.advantage"),
            f"{_LOSS}.step_std=true takes the mean of the step's advantages to be 0, and those of "
            f"algorithm.advantage={advantage} {'may' if is_custom else 'do'} not cancel",
            f"Set algorithm.advantage to grpo or rloo, or {_LOSS}.step_std to false.",
        )


def _a_teacher_has_a_place(config: RunConfig, loss: PolicyGradientLossConfig) -> Iterator[Clash]:
    teacher = loss.teacher
    if teacher is None:
        for name in loss.model_dump(
            include={"teacher_coef", "teacher_reward_coef"}, exclude_defaults=True
        ):
            yield Clash(
                (f"{_LOSS}.{name}", f"{_LOSS}.teacher"),
                f"{_LOSS}.{name} is not used: there is no teacher",
                f"Set {_LOSS}.teacher to a model directory, or leave {_LOSS}.{name} out.",
            )
        return
    if loss.step_std:
        yield Clash(
            (f"{_LOSS}.step_std", f"{_LOSS}.teacher"),
            f"{_LOSS}.step_std=true would divide the teacher's part by the deviation of the rewards' "
            "advantages, which is 0 where they are equal",
            f"Set {_LOSS}.step_std to false, or leave {_LOSS}.teacher out.",
        )
    if config.trainer.backend not in CORE_BACKENDS:
        yield Clash(
            (f"{_LOSS}.teacher", "trainer.backend"),
            f"{_LOSS}.teacher={teacher} is held by trainer.backend=torch alone",
            f"Set trainer.backend to torch, or leave {_LOSS}.teacher out.",
        )


def _old_logprobs_outlast_a_minibatch(
    config: RunConfig, loss: PolicyGradientLossConfig
) -> Iterator[Clash]:
    parts = {"minibatches": config.algorithm.minibatches, "epochs": config.algorithm.epochs}
    name, count = next(((name, n) for name, n in parts.items() if n > 1), ("", 1))
    if count > 1 and loss.old_logprobs == "current":
        yield Clash(
            (f"{_LOSS}.old_logprobs", f"algorithm.{name}"),
            f"{_LOSS}.old_logprobs=current is the policy of each optimizer step, not the one that "
            f"algorithm.{name}={count} began with: the ratio would be 1 in all of them, and bound none",
            f"Set {_LOSS}.old_logprobs to policy, or algorithm.{name} to 1.",
        )


def _minibatches_have_groups(config: RunConfig) -> Iterator[Clash]:
    minibatches, groups = config.algorithm.minibatches, config.groups_per_step
    if minibatches > groups:
        yield Clash(
            ("algorithm.minibatches", "groups_per_step"),
            f"algorithm.minibatches={minibatches} cannot all have a group of groups_per_step={groups}",
            f"Set algorithm.minibatches to {groups} or less.",
        )


def _tries_leave_one_out(config: RunConfig) -> Iterator[Clash]:
    samples, tries = config.samples_per_group, config.algorithm.pass_k
    if config.algorithm.advantage == "pass_at_k" and samples > 1 and tries >= samples:
        yield Clash(
            ("algorithm.pass_k", "samples_per_group"),
            f"algorithm.pass_k={tries} leaves no sample out of samples_per_group={samples}: a sample is "
            "compared with tries it had no part in",
            f"Set algorithm.pass_k to {samples - 1} or less, or samples_per_group to {tries + 1} or more.",
        )
