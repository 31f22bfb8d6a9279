"""Finds settings of ``algorithm`` that cannot work together, and says what to set instead."""

from collections.abc import Iterator

from offbeat.config.clash import Clash
from offbeat.config.run import RunConfig
from offbeat.config.sections.loss import PolicyGradientLossConfig
from offbeat.config.trainer_backends import CORE_BACKENDS

_LOSS = "algorithm.loss"


def algorithm_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield everything about advantage and loss that cannot work."""
    loss = config.algorithm.loss
    if isinstance(loss, PolicyGradientLossConfig):
        yield from _a_deviation_divides_advantages_only(config, loss)
        yield from _a_teacher_has_a_place(config, loss)
        yield from _old_logprobs_outlast_a_minibatch(config, loss)
    yield from _tries_leave_one_out(config)
    yield from _minibatches_have_groups(config)


def _a_deviation_divides_advantages_only(
    config: RunConfig, loss: PolicyGradientLossConfig
) -> Iterator[Clash]:
    if not loss.step_std:
        return
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
    if teacher is not None and config.trainer.backend not in CORE_BACKENDS:
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
