"""Checks of the algorithm: loss, KL penalty, teacher, batch sizes, failed samples, checkpoints."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from offbeat.config.limits import (
    microbatch_tokens,
    min_valid_samples,
    on_failed_sample,
    schedule_in_steps,
    trainer_replicas,
)
from offbeat.config.presets import PRESETS
from offbeat.config.run import RunConfig
from offbeat.config.sections.loss import PolicyGradientLossConfig
from offbeat.launch.checks.model_files import read_model
from offbeat.messages.finding import Finding, error, ok, warning
from offbeat.trainers.teacher import TeacherMismatch, check_tokenizers

_SUBJECT: Final = "algorithm"
_LOSS: Final = "algorithm.loss"


def check_algorithm(config: RunConfig) -> Iterator[Finding]:
    """Warn of bounds from a different loss, ``sft`` on an engine's samples, and greedy samples."""
    yield from _bounds_of_another_loss(config)
    yield from _imitates_itself(config)
    yield from _draws_one_answer(config)


def _bounds_of_another_loss(config: RunConfig) -> Iterator[Finding]:
    preset, loss = config.algorithm.preset, config.algorithm.loss
    if preset is None:
        return
    of_preset = cast("Mapping[str, Any]", PRESETS[preset]["loss"])
    if of_preset["name"] == loss.name:
        return
    fields = type(loss).model_fields
    common = PolicyGradientLossConfig.model_fields
    kept = {
        key: value
        for key, value in of_preset.items()
        if key in fields and key not in common and key != "name"
        if value == getattr(loss, key) != fields[key].default
    }
    if kept:
        keys = " and ".join(f"{_LOSS}.{key}={value:g}" for key, value in kept.items())
        yield warning(
            _SUBJECT,
            f"algorithm.preset={preset} sets {keys} for its loss {of_preset['name']}, but they "
            f"also apply to {_LOSS}.name={loss.name}",
            f"Set {' and '.join(f'{_LOSS}.{key}' for key in kept)}, or use a preset of "
            f"{loss.name}.",
        )


def _imitates_itself(config: RunConfig) -> Iterator[Finding]:
    generator = config.generator
    if (
        config.algorithm.loss.name == "sft"
        and generator.has_engines
        and generator.backend != "stub"
    ):
        yield warning(
            _SUBJECT,
            f"{_LOSS}.name=sft imitates every sample, whatever its reward, but "
            f"generator.backend={generator.backend} samples from the policy: the model would "
            "imitate itself",
            "Set generator.backend to none and environment.name to demonstrations, or choose a "
            "loss that reads rewards.",
        )


def _draws_one_answer(config: RunConfig) -> Iterator[Finding]:
    """Warn of filters that leave one token, because all samples of a group are then equal."""
    samples = config.samples_per_group
    if not config.generator.has_engines or samples == 1:
        return
    sampling = config.generator.sampling
    greedy = {"top_k": sampling.top_k, "min_p": sampling.min_p}
    found = [f"generator.sampling.{key}=1" for key, value in greedy.items() if value == 1]
    if found:
        yield warning(
            _SUBJECT,
            f"{' and '.join(found)} draws the same answer samples_per_group={samples} times: no group has "
            "anything to learn from",
            "Leave it out, or let it keep more tokens.",
        )


def check_checkpoints(config: RunConfig) -> Iterator[Finding]:
    """Report how many steps a restart of the trainer repeats at most."""
    interval, steps = config.checkpoint.interval, config.steps
    if interval:
        most = min(interval, steps)
        yield ok("checkpoints", f"a restart of the trainer trains at most {most} steps again")
        return
    groups = steps * config.groups_per_step
    yield warning(
        "checkpoints",
        f"checkpoint.interval=0: after a restart of the trainer, or a resume of a killed run, all steps "
        f"are trained again from the initial model, up to {steps:,} with {groups:,} groups. The "
        "journal is read back to its beginning for that",
        "Set checkpoint.interval to the number of steps that may be lost.",
    )


def check_kl(config: RunConfig) -> Iterator[Finding]:
    """Warn of a KL penalty whose mean gradient is zero: it does not constrain the policy."""
    loss = config.algorithm.loss
    if (
        isinstance(loss, PolicyGradientLossConfig)
        and loss.kl_coef
        and loss.kl_kind == "k1"
        and loss.kl_gradient == "estimator"
    ):
        yield warning(
            "algorithm",
            f"algorithm.loss.kl_coef={loss.kl_coef:g} with kl_kind=k1 and kl_gradient=estimator: the "
            "gradient of k1 over tokens of the policy is zero on average, so it adds noise and pulls "
            "nowhere",
            "Set algorithm.loss.kl_gradient to unbiased, kl_kind to k2 or k3, or move the penalty into "
            "the reward: algorithm.loss.kl_reward_coef.",
        )


def check_microbatches(config: RunConfig) -> Iterator[Finding]:
    """Warn of a token budget below the longest row. Rows are never cut, so it has no effect."""
    if config.trainer.backend == "stub":
        return
    budget, longest = microbatch_tokens(config.trainer), config.generator.max_model_len
    if budget < longest:
        yield warning(
            "microbatches",
            f"trainer.max_tokens_per_microbatch={config.trainer.max_tokens_per_microbatch} "
            f"holds {budget} tokens, but the longest row has generator.max_model_len={longest}. "
            "A row is never cut: a longer one is a separate microbatch, which needs memory for "
            "all its tokens",
            f"Set it to hold {longest} or more, or lower generator.max_model_len if memory is short.",
        )


_OPTIMIZER = "trainer.optimizer"


def check_optimizer_steps(config: RunConfig) -> Iterator[Finding]:
    """Warn of a peak rate that no step reaches, and of minibatches that leave ranks idle."""
    if config.trainer.backend != "stub":
        yield from _warm_up_ends(config)
        yield from _minibatches_fill_the_ranks(config)


def _warm_up_ends(config: RunConfig) -> Iterator[Finding]:
    given = config.trainer.optimizer
    warmup = schedule_in_steps(config, given).warmup_steps
    if warmup <= config.steps:
        return
    key, written = f"{_OPTIMIZER}.warmup_steps", f"{_OPTIMIZER}.warmup_steps={warmup}"
    if given.warmup_samples:
        key = f"{_OPTIMIZER}.warmup_samples"
        written = f"{key}={given.warmup_samples}, {warmup} steps,"
    peak = given.learning_rate
    yield warning(
        "schedule",
        f"{written} is more than steps={config.steps}: the rate rises to {peak * config.steps / warmup:.3g} "
        f"at the last step and never reaches {_OPTIMIZER}.learning_rate={peak:g}",
        f"Lower {key}, unless this is the beginning of a longer run.",
    )


def _minibatches_fill_the_ranks(config: RunConfig) -> Iterator[Finding]:
    minibatches, ranks = config.algorithm.minibatches, trainer_replicas(config.trainer)
    least = config.groups_per_step // minibatches
    if minibatches == 1 or least >= ranks:
        return
    most = max(1, config.groups_per_step // ranks)
    yield warning(
        "minibatches",
        f"algorithm.minibatches={minibatches} of groups_per_step={config.groups_per_step} have "
        f"{least} groups or one more, for {ranks} data-parallel ranks: in each optimizer step some "
        "wait for the others",
        f"Set algorithm.minibatches to {most} or less, or groups_per_step to {minibatches * ranks} or more.",
    )


def check_failed_samples(config: RunConfig) -> Iterator[Finding]:
    """Report what a failed sample costs, and how retries affect the trained samples."""
    rollout, least = config.rollout, min_valid_samples(config)
    policy = on_failed_sample(config)
    if policy == "fail_group":
        return
    retries = rollout.sample_retries if policy == "retry" else 0
    again = f"is drawn again up to {retries} times, then masked" if retries else "is masked"
    yield ok(
        "failed samples",
        f"one {again}; a group needs {least} of {config.samples_per_group} valid. Long samples fail "
        "and are late more often than short ones, so both favour short ones: watch "
        "rollout/retried_fraction, rollout/masked_fraction and rollout/late_fraction",
    )


_TEACHER_SUBJECT = "teacher"


def check_teacher(config: RunConfig) -> Iterator[Finding]:
    """Check the teacher's files and tokenizer. Yield nothing without a teacher."""
    path = config.algorithm.loss.teacher_path
    if path is None:
        return
    model, _ = read_model(Path(path))
    if model is None:
        seen = f"{path} is not a model directory with config, weights and tokenizer"
        yield error(_TEACHER_SUBJECT, seen, "Point algorithm.loss.teacher at one.")
        return
    try:
        check_tokenizers(path, config.model.path)
    except TeacherMismatch as refused:
        yield error(
            _TEACHER_SUBJECT, str(refused), "Name a teacher with the tokenizer of model.path."
        )
    else:
        yield ok(_TEACHER_SUBJECT, f"{path}: {model.model_type}, {model.parameters:,} parameters")
