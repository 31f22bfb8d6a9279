"""Numbers that follow from a config and on which several packages must agree."""

import math
from dataclasses import dataclass
from typing import Final, Protocol, cast

from offbeat.config.generator_kinds import GeneratorConfig
from offbeat.config.graders import GRADERS
from offbeat.config.mixture import environment_views, evaluation_sets
from offbeat.config.run import RunConfig
from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.config.sections.generator import EmbeddedGeneratorConfig
from offbeat.config.sections.moe import MoeConfig
from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.config.sections.rollout import OnFailedSample
from offbeat.config.sections.sampler import InOrderConfig, WindowedConfig, count_trainable_groups
from offbeat.config.sections.trainer_base import AnyTrainerConfig, ModelTrainerConfig

_LEAST_START_S: Final = 120.0
_LOAD_BYTES_PER_SECOND: Final = 200e6
"""Bytes per second of a model's files from a slow shared disk."""
_ID_BYTES: Final = 4  # prompt_ids, response_ids, weight_versions: int32
_LOGPROB_BYTES: Final = 4  # float32
_MASK_BYTES: Final = 1
_REWARD_BYTES: Final = 4
_OFFSET_BYTES: Final = 8
_BRANCH_BYTES: Final = 4  # branch_samples: int32
_WHOLE_BRANCHES: Final = 4
"""Default token limit of a sample, as a number of branches that fill the model's context. A sample
may have more branches that are shorter. The buffer must hold the largest groups of a step.
"""


def max_outstanding_groups(config: RunConfig) -> int:
    """Return the maximum number of admitted prompt groups that are not yet trained.

    For a custom sampler this is a guess from its staleness bound, because the sampler may admit a
    different number.
    """
    sampler, ahead = config.sampler, config.sampler.max_staleness
    if isinstance(sampler, InOrderConfig) and sampler.max_lookahead is not None:
        ahead = min(sampler.max_lookahead, ahead)
    groups = count_trainable_groups(ahead, config.groups_per_step)
    if isinstance(sampler, WindowedConfig):
        return math.ceil(sampler.over_sampling_ratio * groups)
    return groups


def max_sample_tokens(config: RunConfig) -> int:
    """Return the maximum number of tokens of an agent's sample, over all its branches."""
    rollout = config.rollout
    if rollout.max_sample_tokens is not None:
        return rollout.max_sample_tokens
    branches = rollout.max_branches
    if rollout.branches == "train":
        branches = min(branches, _WHOLE_BRANCHES)
    return branches * config.generator.max_model_len


def max_group_bytes(config: RunConfig) -> int:
    """Return the maximum number of bytes of the packed columns of one prompt group.

    The prompt is stored once, with its pictures. A single-turn response has at most
    ``max_new_tokens``. With more turns, observations are response tokens too, and only
    ``max_model_len`` bounds the sample. ``max_sample_tokens`` bounds an agent's sample, over all
    trained branches. Logprobs that the trainer adds to the group are counted. With several
    environments, the largest groups decide.
    """
    return max(map(_max_group_bytes, environment_views(config).values()))


def _max_group_bytes(config: RunConfig) -> int:
    samples, whole = config.samples_per_group, config.generator.max_model_len
    boundaries = _OFFSET_BYTES  # for one branch
    if config.environment.is_agent:
        most = max_sample_tokens(config)
        whole = response = min(whole, most)
        if config.rollout.branches == "train":
            # A branch has at least two tokens: one of its prompt and one sampled.
            response, branches = most, min(config.rollout.max_branches, most // 2)
            boundaries = branches * (_OFFSET_BYTES + _BRANCH_BYTES)
    elif config.environment.max_turns > 1:
        response = whole
    else:
        response = min(config.generator.sampling.max_new_tokens, whole)
    loss = config.algorithm.loss
    policy = loss.name != "sft" and loss.old_logprobs == "policy"
    logprobs = 1 + policy + loss.needs_reference_logprobs + (loss.teacher_path is not None)
    token = 2 * _ID_BYTES + _MASK_BYTES + logprobs * _LOGPROB_BYTES
    sample = response * token + _REWARD_BYTES + boundaries
    return whole * _ID_BYTES + samples * sample + _OFFSET_BYTES + config.environment.max_media_bytes


def on_failed_sample(config: RunConfig) -> OnFailedSample:
    """Return how a failed sample is handled; by default an agent's sample is drawn again.

    Each of several environments can have a different default. For the whole run, agents decide.
    """
    configured = config.rollout.on_failed_sample
    if configured is not None:
        return configured
    views = environment_views(config).values()
    return "retry" if any(view.environment.is_agent for view in views) else "fail_group"


def min_valid_samples(config: RunConfig) -> int:
    """Return the minimum number of valid samples of a group that is trained."""
    configured = config.rollout.min_valid_samples
    return min(2, config.samples_per_group) if configured is None else configured


def trainer_ranks(config: RunConfig) -> int:
    """Return the number of trainer processes. Expert parallelism is contained in the other axes."""
    trainer = config.trainer
    ranks = trainer_replicas(trainer)
    if isinstance(trainer, ModelTrainerConfig):
        ranks *= trainer.tensor_parallel * trainer.ranks_of_row * trainer.stages
    return ranks + encoder_ranks(trainer)


class EncoderSizes(Protocol):
    """Section of a plug-in for the ranks that hold only the vision tower."""

    @property
    def data_parallel(self) -> int: ...
    @property
    def tensor_parallel(self) -> int: ...
    @property
    def max_tokens_per_microbatch(self) -> int | None: ...
    @property
    def threads(self) -> int: ...
    @property
    def cpus(self) -> float | None: ...
    @property
    def gpus(self) -> float | None: ...


def find_encoder(trainer: AnyTrainerConfig) -> EncoderSizes | None:
    """Return the section of the ranks with only the vision tower, or None without such ranks."""
    return cast("EncoderSizes | None", getattr(trainer, "encoder", None))


def encoder_ranks(trainer: AnyTrainerConfig) -> int:
    """Return the number of ranks that hold only the vision tower: the last of the world."""
    encoder = find_encoder(trainer)
    return 0 if encoder is None else encoder.data_parallel * encoder.tensor_parallel


@dataclass(frozen=True, slots=True)
class RankResources:
    """Resources of one trainer rank."""

    cpus: float  # CPUs reserved by Ray, like ``gpus``
    gpus: float
    threads: int


def rank_resources(trainer: AnyTrainerConfig, rank: int, ranks: int) -> RankResources:
    """Return the resources of a rank in a world of ``ranks`` ranks."""
    threads = trainer.threads if isinstance(trainer, ModelTrainerConfig) else 1
    encoder = find_encoder(trainer)
    if encoder is None or rank < ranks - encoder_ranks(trainer):
        return RankResources(trainer.cpus, trainer.gpus, threads)
    cpus = trainer.cpus if encoder.cpus is None else encoder.cpus
    gpus = trainer.gpus if encoder.gpus is None else encoder.gpus
    return RankResources(cpus, gpus, encoder.threads)


def trainer_resources(config: RunConfig) -> list[RankResources]:
    """Return the resources of every trainer rank, in order."""
    ranks = trainer_ranks(config)
    return [rank_resources(config.trainer, rank, ranks) for rank in range(ranks)]


def microbatch_tokens(trainer: AnyTrainerConfig) -> int:
    """Return the maximum tokens per forward-backward of a replica. Its ranks may share the rows."""
    ranks = trainer.ranks_of_row if isinstance(trainer, ModelTrainerConfig) else 1
    return trainer.max_tokens_per_microbatch * ranks


def encoder_tokens(trainer: AnyTrainerConfig) -> int | None:
    """Return the maximum media tokens that an encoder rank computes at once, None if unbounded."""
    encoder = find_encoder(trainer)
    return None if encoder is None else encoder.max_tokens_per_microbatch


def shares_weights(config: RunConfig) -> bool:
    """Return whether engines and the trainer compute with the same tensors."""
    generator = config.generator
    return isinstance(generator, EmbeddedGeneratorConfig) and generator.share_weights


def freeze_patterns(config: RunConfig) -> tuple[str, ...]:
    """Return the name patterns of parameters that are not trained. Empty: all are trained."""
    trainer = config.trainer
    return trainer.freeze if isinstance(trainer, ModelTrainerConfig) else ()


def find_moe(config: RunConfig) -> MoeConfig | None:
    """Return how the run balances experts, or None to leave it to the loss."""
    trainer = config.trainer
    moe = trainer.moe if isinstance(trainer, ModelTrainerConfig) else None
    return moe if moe is not None and (moe.has_losses or moe.bias_update_rate) else None


def trainer_replicas(trainer: AnyTrainerConfig) -> int:
    """Return the number of data-parallel ranks, which divide the groups of a step."""
    return trainer.data_parallel if isinstance(trainer, ModelTrainerConfig) else 1


def trainer_device(trainer: AnyTrainerConfig) -> str:
    """Return the torch device of each rank; ``cpu`` for a stub, because it has no tensors."""
    return trainer.device if isinstance(trainer, ModelTrainerConfig) else "cpu"


def start_deadline_s(section: GeneratorConfig | AnyTrainerConfig, model_bytes: int = 0) -> float:
    """Return the number of seconds in which a trainer or an engine must start.

    Args:
        section: Its section of the recipe. A number there overrides the computed one.
        model_bytes: Bytes of the model's weight files.
    """
    given = section.start_deadline_s
    return _LEAST_START_S + model_bytes / _LOAD_BYTES_PER_SECOND if given is None else given


def schedule_in_steps(config: RunConfig, optimizer: OptimizerConfig) -> OptimizerConfig:
    """Return the optimizer's section with warm-up and decay in steps; keys in samples are None.

    Samples are counted in whole batches, even if a step trained fewer because groups were dropped.
    So the schedule depends only on the version, even after a resume.
    """
    per_step = config.groups_per_step * config.samples_per_group
    counts = {"warmup": optimizer.warmup_samples, "decay": optimizer.decay_samples}
    changes: dict[str, int | None] = {}
    for what, samples in counts.items():
        if samples is not None:
            changes[f"{what}_steps"] = -(-samples // per_step)
            changes[f"{what}_samples"] = None
    return optimizer.model_copy(update=changes)


def count_functions(environment: EnvironmentConfig) -> int:
    """Return the number of reward functions of an environment, without built-in graders."""
    if environment.name != "function":
        return 0
    targets = [each.target for each in environment.rewards.values()] or [environment.target]
    return sum(target not in GRADERS for target in targets)


def max_reward_calls(config: RunConfig) -> int:
    """Return the maximum number of reward calls of one group, including retries."""
    return config.samples_per_group * _calls_per_sample(config)


def max_evaluation_calls(config: RunConfig) -> int:
    """Return the maximum number of reward calls of one evaluation; 0 without evaluations."""
    if not (config.eval.interval or config.eval.at_start):
        return 0
    samples = sum(
        (one.prompts or 0) * (one.samples or 1) for one in evaluation_sets(config).values()
    )
    return samples * _calls_per_sample(config)


def _calls_per_sample(config: RunConfig) -> int:
    """Return the maximum number of calls for one sample of a group.

    A group is first scored as a whole. If a failed sample does not fail its group, each sample is
    then scored by itself. A sample that is drawn again is scored once more each time.
    """
    scorings = 1
    policy = on_failed_sample(config)
    if policy != "fail_group":
        scorings += 1 + (config.rollout.sample_retries if policy == "retry" else 0)
    per_sample = max(
        count_functions(view.environment) * (1 + view.environment.reward_retries)
        for view in environment_views(config).values()
    )
    return scorings * per_sample
