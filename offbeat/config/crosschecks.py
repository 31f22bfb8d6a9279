"""Finds combinations of settings that cannot work, and suggests settings that do.

Each check receives a whole config and yields clashes. A clash explains what would happen, not only
that it is forbidden. The models check single values out of range.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from offbeat.config.base import Config
from offbeat.config.crosschecks_local import local_clashes, shared_weights_clashes
from offbeat.config.engine_plugin import find_engine, suggest_engine
from offbeat.config.environment_traits import find_traits
from offbeat.config.hub_path import (
    FORM,
    READABLE,
    hub_path,
    is_on_hub,
)
from offbeat.config.limits import (
    encoder_ranks,
    find_encoder,
    find_moe,
    max_evaluation_calls,
    max_group_bytes,
    max_outstanding_groups,
    max_reward_calls,
    on_failed_sample,
    schedule_in_steps,
    trainer_device,
    trainer_ranks,
    trainer_resources,
)
from offbeat.config.mixture import environment_views, has_media, text_in
from offbeat.config.plugin_sections import (
    delta_clashes,
    plugin_clashes,
    quantize_clashes,
    sync_plugin_clashes,
    transport_clashes,
    transport_clashes_of_real_run,
)
from offbeat.config.problems import Clash
from offbeat.config.run import RunConfig
from offbeat.config.sections.data import DataConfig
from offbeat.config.sections.environment import EnvironmentConfig, media_clashes
from offbeat.config.sections.loss import PolicyGradientLossConfig
from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.config.sections.sampler import CustomSamplerConfig, InOrderConfig, WindowedConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.config.trainer_backends import CORE_BACKENDS, find_trainer_rules
from offbeat.config.trainer_parts import (
    freezing_keys,
    has_part,
    model_is_frozen,
    part_clashes,
    part_clashes_of_real_runs,
)
from offbeat.doors import find_media

__all__ = ["Clash", "clashes"]

_MIB = 2**20


def clashes(config: RunConfig, *, dry_run: bool = False) -> Iterator[Clash]:
    """Yield every setting or combination of ``config`` that cannot work.

    A dry run needs no backend and no device.
    """
    for check in _ALWAYS if dry_run else _ALWAYS + _REAL_RUNS:
        yield from check(config)


def section_clashes(section: Config) -> Iterator[Clash]:
    """Yield clashes within each section, except environments and sections in mappings."""
    yield from section.find_clashes()
    for _, value in section:
        if isinstance(value, Config) and not isinstance(value, EnvironmentConfig):
            yield from section_clashes(value)


# --- staleness, buffer and flow ------------------------------------------------------------------


def _staleness_covers_the_sync_interval(config: RunConfig) -> Iterator[Clash]:
    staleness, interval = config.sampler.max_staleness, config.sync.interval
    if staleness < interval - 1:
        yield Clash(
            ("sampler.max_staleness", "sync.interval"),
            f"sampler.max_staleness={staleness} is impossible with sync.interval={interval}: "
            f"just before a sync, even a fresh sample is {interval - 1} weight versions behind "
            "the trainer",
            f"Set sampler.max_staleness to {interval - 1} or more, or sync.interval to {staleness + 1} "
            "or less.",
        )


def _stubs_come_together(config: RunConfig) -> Iterator[Clash]:
    chosen = {
        "generator.backend": config.generator.backend,
        "trainer.backend": config.trainer.backend,
        "environment.name": config.environment.name,
    }
    stubs = [key for key, value in chosen.items() if value == "stub"]
    real = [key for key, value in chosen.items() if value != "stub"]
    if stubs and real:
        yield Clash(
            (stubs[0], *stubs[1:], *real),
            f"{' and '.join(f'{key}=stub' for key in stubs)} cannot work with "
            f"{' and '.join(f'{key}={chosen[key]}' for key in real)}: stubs make up tokens and "
            "weights that nothing real can use",
            "Set all three to stub, or none; offbeat dry-run does it for any recipe.",
        )


def _in_flight_is_reachable(config: RunConfig) -> Iterator[Clash]:
    max_in_flight, max_outstanding = config.rollout.max_in_flight, max_outstanding_groups(config)
    custom = isinstance(config.sampler, CustomSamplerConfig)  # only the sampler knows its limit
    if max_in_flight is not None and max_in_flight > max_outstanding and not custom:
        yield Clash(
            ("rollout.max_in_flight", "sampler.max_staleness", "groups_per_step"),
            f"rollout.max_in_flight={max_in_flight} can never be reached: sampler.name={config.sampler.name} with "
            f"sampler.max_staleness={config.sampler.max_staleness} and "
            f"groups_per_step={config.groups_per_step} admits {max_outstanding} groups",
            f"Set rollout.max_in_flight to {max_outstanding} or less, or raise sampler.max_staleness.",
        )


def _buffer_holds_the_groups_of_a_step(config: RunConfig) -> Iterator[Clash]:
    capacity, needed = config.buffer.capacity_groups, config.groups_per_step
    if capacity is not None and capacity < needed:
        yield Clash(
            ("buffer.capacity_groups", "groups_per_step"),
            f"buffer.capacity_groups={capacity} is less than groups_per_step={needed}: no step could "
            "ever be filled",
            f"Set buffer.capacity_groups to {needed} or more, or leave it out: the sampler then admits "
            f"{max_outstanding_groups(config)} groups.",
        )


def _buffer_holds_what_is_over_sampled(config: RunConfig) -> Iterator[Clash]:
    sampler, capacity = config.sampler, config.buffer.capacity_groups
    if not isinstance(sampler, WindowedConfig) or capacity is None:
        return
    ratio, max_outstanding = sampler.over_sampling_ratio, max_outstanding_groups(config)
    if ratio > 1 and capacity < max_outstanding:
        yield Clash(
            ("sampler.over_sampling_ratio", "buffer.capacity_groups", "groups_per_step"),
            f"sampler.over_sampling_ratio={ratio:g} cannot be reached with "
            f"buffer.capacity_groups={capacity}: over-sampling admits {max_outstanding} groups at once, and "
            "those without room in the buffer are never generated",
            f"Set buffer.capacity_groups to {max_outstanding} or more, leave it out, or set "
            "sampler.over_sampling_ratio to 1.",
        )


def _buffer_holds_the_bytes_of_a_step(config: RunConfig) -> Iterator[Clash]:
    group = max_group_bytes(config)
    needed = config.groups_per_step * group
    media = (find_media().LIMIT_KEY,) if has_media(config) else ()
    if config.buffer.capacity_mib * _MIB < needed:
        yield Clash(
            (
                "buffer.capacity_mib",
                "groups_per_step",
                "samples_per_group",
                "generator.max_model_len",
                "generator.sampling.max_new_tokens",
                *media,
            ),
            f"buffer.capacity_mib={config.buffer.capacity_mib:g} is too small for a step of the "
            f"largest groups: {config.groups_per_step} groups of up to {group / _MIB:.3g} MiB "
            f"need {needed / _MIB:.4g} MiB",
            f"Set buffer.capacity_mib to {-(-needed // _MIB)} or more, or lower groups_per_step, "
            f"{''.join(f'{key}, ' for key in media)}samples_per_group, generator.max_model_len or "
            "generator.sampling.max_new_tokens.",
        )


# --- sampling and learning -----------------------------------------------------------------------


def _deterministic_decoding_has_one_order(config: RunConfig) -> Iterator[Clash]:
    if not config.generator.deterministic:
        return
    if not config.generator.has_engines:
        return  # ``demonstration_clashes`` checks what these need
    if config.generator.engines > 1:
        yield Clash(
            ("generator.deterministic", "generator.engines"),
            "generator.deterministic=true is impossible with "
            f"generator.engines={config.generator.engines}: timing decides which engine serves "
            "a group, and with which weights",
            "Set generator.engines to 1, or generator.deterministic to false.",
        )
    if not isinstance(config.sampler, InOrderConfig):
        yield Clash(
            ("generator.deterministic", "sampler.name"),
            "generator.deterministic=true is impossible with "
            f"sampler.name={config.sampler.name}: the content of a batch depends on when groups "
            "finish",
            "Set sampler.name to in_order, or generator.deterministic to false.",
        )


def _a_group_has_something_to_compare(config: RunConfig) -> Iterator[Clash]:
    loss = config.algorithm.loss
    learns_alone = loss.name == "sft" or _teacher_alone(config)
    if config.samples_per_group == 1 and not learns_alone:
        yield Clash(
            ("samples_per_group", "algorithm.advantage"),
            f"samples_per_group=1 gives algorithm.advantage={config.algorithm.advantage} nothing to "
            "compare: a lone sample's advantage is 0, so nothing would be learned",
            "Set samples_per_group to 2 or more; 8 is a usual choice.",
        )


def _teacher_alone(config: RunConfig) -> bool:
    """Return whether advantages come only from a teacher, without any part for rewards."""
    loss = config.algorithm.loss
    return loss.name != "sft" and loss.teacher is not None and not loss.teacher_reward_coef


def _a_filter_lets_something_through(config: RunConfig) -> Iterator[Clash]:
    if config.filters.zero_variance and _teacher_alone(config):
        yield Clash(
            ("filters.zero_variance", "algorithm.loss.teacher"),
            "filters.zero_variance=true drops groups by rewards that are not trained: with "
            "algorithm.loss.teacher_reward_coef=0 every group has a gradient from its teacher",
            "Set filters.zero_variance to false, or algorithm.loss.teacher_reward_coef above 0.",
        )
    if config.filters.zero_variance and config.samples_per_group == 1:
        yield Clash(
            ("filters.zero_variance", "samples_per_group"),
            "filters.zero_variance=true refuses every group with samples_per_group=1: the reward of a "
            "lone sample has no variance",
            "Set samples_per_group to 2 or more, or filters.zero_variance to false.",
        )


def algorithm_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield a teacher that the trainer cannot hold, and groups that are too small or too few."""
    teacher, backend = config.algorithm.loss.teacher_path, config.trainer.backend
    if teacher is not None and backend not in CORE_BACKENDS:
        yield Clash(
            ("algorithm.loss.teacher", "trainer.backend"),
            f"algorithm.loss.teacher={teacher} needs trainer.backend=torch",
            "Set trainer.backend to torch, or leave algorithm.loss.teacher out.",
        )
    samples, tries = config.samples_per_group, config.algorithm.pass_k
    if config.algorithm.advantage == "pass_at_k" and samples > 1 and tries >= samples:
        yield Clash(
            ("algorithm.pass_k", "samples_per_group"),
            f"algorithm.pass_k={tries} leaves no sample out of samples_per_group={samples}: a sample is "
            "compared with tries it had no part in",
            f"Set algorithm.pass_k to {samples - 1} or less, or samples_per_group to {tries + 1} or more.",
        )
    minibatches, groups = config.algorithm.minibatches, config.groups_per_step
    if minibatches > groups:
        yield Clash(
            ("algorithm.minibatches", "groups_per_step"),
            f"algorithm.minibatches={minibatches} is more than groups_per_step={groups}: some "
            "minibatches would have no group",
            f"Set algorithm.minibatches to {groups} or less.",
        )


def moe_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield settings that cannot work together with ``trainer.moe``."""
    moe = find_moe(config)
    if moe is None:
        return
    loss = config.algorithm.loss
    if not moe.has_losses or not isinstance(loss, PolicyGradientLossConfig):
        return
    coefs = "trainer.moe.load_balancing_coef", "trainer.moe.z_loss_coef"
    if loss.step_std:
        yield Clash(
            (*coefs, "algorithm.loss.step_std"),
            "algorithm.loss.step_std=true would divide the losses of trainer.moe too: the deviation is "
            "known only when the gradients of all losses have been added up",
            "Set algorithm.loss.step_std to false, or balance with trainer.moe.bias_update_rate.",
        )
    drops = (loss.icepop_band, loss.sequence_band, loss.off_policy_delta)
    if not loss.count_dropped and any(each is not None for each in drops):
        yield Clash(
            (*coefs, "algorithm.loss.count_dropped"),
            "algorithm.loss.count_dropped=false divides by the kept tokens, but the losses of "
            "trainer.moe are also summed over dropped tokens: their weight would grow with "
            "each dropped token",
            "Set algorithm.loss.count_dropped to true, or balance with trainer.moe.bias_update_rate.",
        )


# --- what this version can run -------------------------------------------------------------------


def _devices_and_gpus_agree(config: RunConfig) -> Iterator[Clash]:
    for section, chosen in (("generator", config.generator), ("trainer", config.trainer)):
        if chosen.backend == "stub":
            continue
        device, gpus = chosen.device, chosen.gpus
        kind = device.partition(":")[0]
        if kind not in ("cpu", "cuda"):
            yield Clash(
                (f"{section}.device",),
                f"{section}.device={device} is not a device that this version runs on",
                "Set it to cpu or cuda.",
            )
        elif kind == "cuda" and gpus == 0 and config.runtime.backend == "ray":
            yield Clash(
                (f"{section}.device", f"{section}.gpus"),
                f"{section}.device={device} with {section}.gpus=0: Ray hides the GPUs from an actor that "
                "reserves none",
                f"Set {section}.gpus to 1, or {section}.device to cpu.",
            )
        elif kind == "cpu" and gpus > 0:
            yield Clash(
                (f"{section}.gpus", f"{section}.device"),
                f"{section}.gpus={gpus:g} with {section}.device=cpu: the GPU would be reserved and left idle",
                f"Set {section}.device to cuda, or {section}.gpus to 0.",
            )


# --- prompts --------------------------------------------------------------------------------------


def data_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield environments without prompts, files that are not read, and paths that name no file."""
    yield from _prompts_have_one_source(config)
    yield from _paths_on_the_hub_name_files(config)


def _paths_on_the_hub_name_files(config: RunConfig) -> Iterator[Clash]:
    for key, path in {"data.path": config.data.path, **config.eval.paths}.items():
        if path is None or not is_on_hub(path):
            continue
        wanted = hub_path(path)
        if wanted is None:
            yield Clash(
                (key,),
                f"{key}={path} names no files on the hub",
                f"Write {FORM}, where FILES may hold *; a slash in REVISION is %2F.",
            )
        elif not wanted.is_readable:
            yield Clash(
                (key,),
                f"{key}={path} names files that cannot be read: prompts are Parquet or JSON Lines, "
                f"{', '.join(READABLE)}",
                "Name such files. The hub keeps Parquet files of most datasets under the revision "
                "refs%2Fconvert%2Fparquet.",
            )


def _prompts_have_one_source(config: RunConfig) -> Iterator[Clash]:
    name, path = config.environment.name, config.data.path
    file = find_traits(name).prompt_file
    if config.environment.makes_prompts and path is not None:
        yield Clash(
            ("data.path", "environment.name"),
            f"data.path is not used: environment.name={name} makes its own prompts",
            "Leave data.path out, or set environment.name to function to score the rows of your file.",
        )
    elif file is not None and path is None:
        yield Clash(
            ("data.path", "environment.name"),
            f"environment.name={name} has no {file.missing}",
            f"Set data.path to a {file.rows}.",
        )
    if config.data.columns and path is None:
        yield Clash(
            ("data.columns", "data.path"),
            "data.columns is not used without data.path",
            "Set data.path to the file that has these columns, or leave data.columns out.",
        )


def eval_set_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield settings of evaluation sets that are not read."""
    if config.environment.makes_prompts:
        for key in config.eval.paths:
            yield Clash(
                (key, "environment.name"),
                f"{key} is not used: environment.name={config.environment.name} makes its own prompts",
                f"Leave {key} out: the first prompts of the training source are scored.",
            )
    sets = {f"eval.sets.{name}": each for name, each in config.eval.sets.items()}
    for section, each in {"eval": config.eval, **sets}.items():
        if each.columns and each.path is None:
            yield Clash(
                (f"{section}.columns", f"{section}.path"),
                f"{section}.columns is not used without {section}.path",
                f"Set {section}.path to the file that has these columns, or leave them out.",
            )


def in_each_environment(
    check: Callable[[RunConfig], Iterator[Clash]],
) -> Callable[[RunConfig], Iterator[Clash]]:
    """Turn a check of a single environment into a check of all environments of a run."""

    def check_each(config: RunConfig) -> Iterator[Clash]:
        for name, view in environment_views(config).items():
            for clash in check(view):
                keys = tuple(text_in(name, key) for key in clash.keys)
                yield Clash(keys, text_in(name, clash.message), text_in(name, clash.hint))

    return check_each


def mixture_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield settings unused with several environments, and environments that cannot be mixed."""
    if not config.environments:
        return
    single = {
        "environment": config.environment != EnvironmentConfig(),
        "data": config.data != DataConfig(),
    }
    for key, is_set in single.items():
        if is_set:
            yield Clash(
                (key, "environments"),
                f"{key} is not used: the run trains on the environments in section environments",
                f"Write it below one of them, as in environments.NAME.{key}, or leave it out.",
            )
    scored = {
        "eval.path": config.eval.path,
        "eval.columns": config.eval.columns,
        "eval.sets": config.eval.sets,
    }
    for key, value in scored.items():
        if value:
            yield Clash(
                (key, "environments"),
                f"{key} is not used: each of environments has a separate evaluation set",
                "Name the files in environments.NAME.eval.",
            )
    for name, each in config.environments.items():
        if each.environment.name == "demonstrations":
            yield Clash(
                (f"environments.{name}.environment.name",),
                f"environments.{name}.environment.name=demonstrations cannot be mixed: its rows are "
                "trained without an engine, but the others need one",
                "Train on the demonstrations first, in a separate run, and start from its model.",
            )


# --- rewards, samples and demonstrations ----------------------------------------------------------


_UNREAD: Final = {
    "environment": (
        "target",
        "command",
        "options",
        "reward_deadline_s",
        "reward_start_s",
        "reward_workers",
        "reward_memory_mib",
        "variables",
        "max_turns",
    ),
    "rollout": ("on_failed_sample", "sample_retries", "max_sample_tokens", "max_branches"),
}
"""Keys that are not read if no model is called and no sample is scored."""


def demonstration_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield a generator set despite demonstrations, or settings that need a missing generator."""
    recorded = config.environment.name == "demonstrations"
    generator = config.generator
    if recorded and generator.has_engines:
        yield Clash(
            ("environment.name", "generator.backend"),
            f"environment.name=demonstrations has no work for generator.backend={generator.backend}: "
            "its samples are rows of a file",
            "Set generator.backend to none.",
        )
    if not (generator.has_engines or recorded):
        yield Clash(
            ("generator.backend", "environment.name"),
            f"generator.backend=none draws no samples, but environment.name={config.environment.name} "
            "needs them",
            "Set environment.name to demonstrations, or generator.backend to "
            f"{suggest_engine('embedded')}.",
        )
    if recorded:
        yield from _rows_are_trained_as_they_are(config)


def _rows_are_trained_as_they_are(config: RunConfig) -> Iterator[Clash]:
    if config.data.path is None:
        yield Clash(
            ("data.path", "environment.name"),
            "environment.name=demonstrations needs a file of rows",
            "Set data.path to a JSON Lines file with `prompt` and `completion`, or `messages`, in "
            "each row.",
        )
    for section, keys in _UNREAD.items():
        set_here = getattr(config, section).model_dump(exclude_defaults=True)
        for key in (each for each in keys if each in set_here):
            yield Clash(
                (f"{section}.{key}", "environment.name"),
                f"{section}.{key} is not used with environment.name=demonstrations: no model is called "
                "and nothing is scored",
                f"Leave {section}.{key} out.",
            )
    loss = config.algorithm.loss.name
    if loss != "sft":
        yield Clash(
            ("algorithm.loss.name", "environment.name"),
            f"algorithm.loss.name={loss} learns nothing with environment.name=demonstrations: rows "
            "have neither rewards nor logprobs of an engine",
            "Set algorithm.loss.name to sft.",
        )
    if config.samples_per_group != 1:
        yield Clash(
            ("samples_per_group", "environment.name"),
            f"samples_per_group={config.samples_per_group} with environment.name=demonstrations: a row "
            "holds one sample",
            "Set samples_per_group to 1; groups_per_step is the number of rows in a step.",
        )
    if config.sampler.name != "in_order":
        yield Clash(
            ("sampler.name", "environment.name"),
            f"sampler.name={config.sampler.name} decides by the age of samples, but rows of "
            "environment.name=demonstrations have none",
            "Set sampler.name to in_order, and sampler.max_staleness to the steps to read ahead.",
        )
    if config.eval.interval:
        yield Clash(
            ("eval.interval", "generator.backend"),
            f"eval.interval={config.eval.interval} needs an engine to sample the held-out prompts, but "
            f"generator.backend={config.generator.backend} has none",
            "Set eval.interval to 0; evaluate the exported model in a run that has engines.",
        )


def reward_budget_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield a budget of calls that bounds nothing, or that does not cover the first step."""
    budget = config.rollout.reward_call_budget
    if budget is None:
        return
    per_group, scored = max_reward_calls(config), max_evaluation_calls(config)
    if not per_group:
        yield Clash(
            ("rollout.reward_call_budget", "environment.name"),
            "rollout.reward_call_budget is not used: "
            f"environment.name={config.environment.name} calls none of your reward functions, "
            "and calls by an agent's program are not counted",
            "Leave it out, or name a reward function with environment.name=function.",
        )
    elif budget < (least := config.groups_per_step * per_group + scored):
        beside = f", and an evaluation up to {scored}" if scored else ""
        yield Clash(
            ("rollout.reward_call_budget", "groups_per_step"),
            f"rollout.reward_call_budget={budget} may not cover one step: the rewards of "
            f"groups_per_step={config.groups_per_step} groups make up to {per_group} calls each{beside}",
            f"Set it to {least} or more.",
        )


def agent_limit_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield limits of agents' samples in a run without agents, and limits that nothing reaches."""
    for name, view in environment_views(config).items():
        episode_s, group_s = view.environment.episode_deadline_s, config.rollout.deadline_s
        if episode_s is not None and episode_s >= group_s:
            key = "environment.episode_deadline_s"
            key = f"environments.{name}.{key}" if config.environments else key
            yield Clash(
                (key, "rollout.deadline_s"),
                f"{key}={episode_s:g} is never reached: rollout.deadline_s={group_s:g} ends the "
                "whole group first",
                f"Set it to {group_s / 2:g} or less, so that a late episode can be retried.",
            )
    if any(view.environment.is_agent for view in environment_views(config).values()):
        return
    of_agents = {"max_sample_tokens", "max_branches", "branches"}
    for key, value in config.rollout.model_dump(include=of_agents, exclude_defaults=True).items():
        yield Clash(
            (f"rollout.{key}", "environment.name"),
            f"rollout.{key}={value} is not used: it applies only to samples of agents",
            f"Leave rollout.{key} out.",
        )


def sample_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield a minimum of valid samples that no or every group meets, and an unused penalty."""
    yield from _overlong_clashes(config)
    minimum = config.rollout.min_valid_samples
    if minimum is None:
        return
    if minimum > config.samples_per_group:
        yield Clash(
            ("rollout.min_valid_samples", "samples_per_group"),
            f"rollout.min_valid_samples={minimum} can never be reached with "
            f"samples_per_group={config.samples_per_group}: every group would be dropped",
            f"Set rollout.min_valid_samples to {config.samples_per_group} or less.",
        )
    if on_failed_sample(config) == "fail_group":
        yield Clash(
            ("rollout.min_valid_samples", "rollout.on_failed_sample"),
            f"rollout.min_valid_samples={minimum} is not used with rollout.on_failed_sample=fail_group: "
            "no sample is ever masked",
            "Set rollout.on_failed_sample to retry or mask, or leave rollout.min_valid_samples out.",
        )


def _overlong_clashes(config: RunConfig) -> Iterator[Clash]:
    stretch, longest = config.rollout.overlong_tokens, config.generator.sampling.max_new_tokens
    environment = config.environment
    if stretch is None:
        return
    if stretch > longest:
        yield Clash(
            ("rollout.overlong_tokens", "generator.sampling.max_new_tokens"),
            f"rollout.overlong_tokens={stretch} is longer than a response can be: "
            f"generator.sampling.max_new_tokens={longest}",
            f"Set rollout.overlong_tokens to {longest} or less.",
        )
    if environment.is_agent or environment.name == "demonstrations" or environment.max_turns > 1:
        yield Clash(
            ("rollout.overlong_tokens", "environment.name"),
            f"rollout.overlong_tokens={stretch} measures one response against "
            "generator.sampling.max_new_tokens, but samples of this environment have several, or none",
            "Leave rollout.overlong_tokens out, and let the reward see the length.",
        )


# --- schedule and rounding ------------------------------------------------------------------------


def rounding_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield settings that cannot be combined with random rounding."""
    trainer = config.trainer
    if trainer.backend == "stub" or trainer.optimizer.rounding == "nearest":
        return
    key, ranks = "trainer.optimizer.rounding", trainer_ranks(config)
    has_encoder = find_encoder(trainer) is not None
    one_rank = "train on one rank, with trainer.data_parallel and trainer.tensor_parallel of 1"
    if has_encoder:
        one_rank = "train on one rank, without trainer.encoder"
    if trainer.backend != "torch":
        yield Clash(
            (key, "trainer.backend"),
            f"{key}=stochastic needs trainer.backend=torch: {trainer.backend} rounds weights itself",
            f"Set {key} to nearest, or trainer.backend to torch.",
        )
    if ranks > 1:
        yield Clash(
            (key, "trainer.encoder" if has_encoder else "trainer.data_parallel"),
            f"{key}=stochastic cannot be combined with {ranks} trainer ranks: each gathers float32 weights and "
            "rounds them to the nearest",
            f"Set {key} to nearest, also for a resumed run, or {one_rank}.",
        )
    if config.model.dtype != "bfloat16":
        yield Clash(
            (key, "model.dtype"),
            f"{key}=stochastic does nothing with model.dtype={config.model.dtype}: its weights are the "
            "optimizer's own",
            f"Set model.dtype to bfloat16, or {key} to nearest.",
        )


_OPTIMIZER = "trainer.optimizer"


def schedule_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield a minimum above the peak, and keys that the schedule does not read or lacks."""
    if config.trainer.backend == "stub":
        return
    given = config.trainer.optimizer
    optimizer = schedule_in_steps(config, given)
    decay = optimizer.decay_steps
    decays, warms = _phase("decay", given, optimizer), _phase("warmup", given, optimizer)
    if decay is None and optimizer.schedule == "wsd":
        yield Clash(
            (f"{_OPTIMIZER}.decay_steps", f"{_OPTIMIZER}.schedule"),
            f"{_OPTIMIZER}.schedule=wsd needs {_OPTIMIZER}.decay_steps or decay_samples",
            f"Set {_OPTIMIZER}.decay_steps to the number of last steps that decay; a tenth to a fifth "
            "of the run is usual.",
        )
    if decay is not None and optimizer.schedule != "wsd":
        yield Clash(
            (decays.key, f"{_OPTIMIZER}.schedule"),
            f"{decays} is not used: {_OPTIMIZER}.schedule={optimizer.schedule}",
            f"Set {_OPTIMIZER}.schedule to wsd, or leave {decays.key} out.",
        )
    elif decay is not None and decay + optimizer.warmup_steps > config.steps:
        per_unit = decays.per_step(config)
        most = max(1, config.steps - optimizer.warmup_steps) * per_unit
        yield Clash(
            (decays.key, warms.key, "steps"),
            f"{decays} and {warms} are more than steps={config.steps}: the peak is never reached",
            f"Set {decays.key} to {most} or less."
            if optimizer.warmup_steps < config.steps
            else f"Set {warms.key} to less than {config.steps * warms.per_step(config)}.",
        )


@dataclass(frozen=True, slots=True)
class _Phase:
    """The length of warm-up or decay, with the key that the recipe uses for it."""

    key: str
    given: int
    steps: int

    def __str__(self) -> str:
        in_steps = f" ({self.steps} steps)" if self._is_in_samples else ""
        return f"{self.key}={self.given}{in_steps}"

    def per_step(self, config: RunConfig) -> int:
        """Return the length of a step in the key's unit."""
        return config.groups_per_step * config.samples_per_group if self._is_in_samples else 1

    @property
    def _is_in_samples(self) -> bool:
        return self.key.endswith("_samples")


def _phase(
    what: Literal["decay", "warmup"], given: OptimizerConfig, in_steps: OptimizerConfig
) -> _Phase:
    steps = (in_steps.decay_steps if what == "decay" else in_steps.warmup_steps) or 0
    samples = given.decay_samples if what == "decay" else given.warmup_samples
    if samples is None:
        return _Phase(f"{_OPTIMIZER}.{what}_steps", steps, steps)
    return _Phase(f"{_OPTIMIZER}.{what}_samples", samples, steps)


# --- sizes of trainer and fleet -------------------------------------------------------------------


def layout_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield parallel sizes that cannot work together, or not with another setting."""
    trainer = config.trainer
    size = trainer.tensor_parallel if isinstance(trainer, TorchTrainerConfig) else 1
    if size > 1 and not has_part("tensor_parallel"):
        yield Clash(
            ("trainer.tensor_parallel",),
            f"trainer.tensor_parallel={size}: no plug-in that divides matrices over "
            "ranks of trainer.backend=torch is installed",
            "Reinstall offbeat, or set trainer.tensor_parallel to 1.",
        )
    if (plugin := find_trainer_rules(trainer.backend)) is not None:
        yield from plugin.find_clashes(config)


MOST_TRAINER_RANKS: Final = 1 << 17
"""More GPUs than any training machine has. Computations per rank still end within seconds."""


def rank_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield an impossible number of trainer ranks: a typing error that would be slow to compute."""
    ranks, encoders = trainer_ranks(config), encoder_ranks(config.trainer)
    if ranks > MOST_TRAINER_RANKS:
        of_encoders = f", {encoders} of them of trainer.encoder," if encoders else ""
        yield Clash(
            ("trainer.data_parallel", *(["trainer.encoder"] if encoders else [])),
            f"the sizes of trainer make {ranks} trainer ranks{of_encoders} and at most "
            f"{MOST_TRAINER_RANKS} are possible",
            "Lower trainer.data_parallel or another size of trainer"
            f"{' or trainer.encoder' if encoders else ''}.",
        )


def rank_gpu_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield fractional GPUs with several trainer ranks.

    Ray may put two ranks on one GPU, which NCCL refuses.
    """
    resources = trainer_resources(config) if trainer_device(config.trainer) != "cpu" else []
    least = min((each.gpus for each in resources), default=1.0)
    if len(resources) > 1 and 0 < least < 1:
        key = "trainer.gpus" if config.trainer.gpus == least else "trainer.encoder.gpus"
        yield Clash(
            (key, "trainer.device"),
            f"{key}={least:g} may put two of the {len(resources)} trainer ranks on one GPU, but "
            "NCCL needs a separate GPU for each rank",
            f"Set {key} to 1, or use one trainer rank.",
        )


# --- weight sync ----------------------------------------------------------------------------------


def wire_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield releases that the engines could not load."""
    yield from _adapter_clashes(config)
    yield from quantize_clashes(config)
    yield from transport_clashes_of_real_run(config)
    yield from delta_clashes(config)
    # Embedded engines hold and accept only the type of the recipe's model.
    wire, served = config.sync.wire_dtype, config.model.dtype
    if config.generator.backend == "embedded" and wire not in (None, served):
        yield Clash(
            ("sync.wire_dtype", "model.dtype", "generator.backend"),
            f"sync.wire_dtype={wire} does not fit generator.backend=embedded, which serves "
            f"model.dtype={served}",
            f"Set sync.wire_dtype to null, or model.dtype to {wire}.",
        )


def _adapter_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield releases that are merged although there are no adapters."""
    if config.sync.adapter == "merged" and not model_is_frozen(config):
        keys = freezing_keys()
        missing = " or ".join(keys) or "a plug-in of adapters"
        other = f"set {missing}" if keys else "reinstall offbeat"
        yield Clash(
            ("sync.adapter", *keys),
            f"sync.adapter=merged has nothing to merge: without {missing}, every release is the "
            "whole model",
            f"Leave sync.adapter out, or {other}.",
        )


def _engine_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield engine settings that the engine's plug-in refuses."""
    engines = find_engine(config.generator.backend)
    if engines is not None:
        yield from engines.find_clashes(config)


_ALWAYS = (
    section_clashes,
    plugin_clashes,
    sync_plugin_clashes,
    _staleness_covers_the_sync_interval,
    transport_clashes,
    rank_clashes,
    _in_flight_is_reachable,
    _buffer_holds_the_groups_of_a_step,
    _buffer_holds_what_is_over_sampled,
    _buffer_holds_the_bytes_of_a_step,
    _deterministic_decoding_has_one_order,
    _a_group_has_something_to_compare,
    sample_clashes,
    _a_filter_lets_something_through,
    algorithm_clashes,
    schedule_clashes,
    part_clashes,
    moe_clashes,
    mixture_clashes,
    in_each_environment(lambda config: config.environment.find_clashes()),
    reward_budget_clashes,
    agent_limit_clashes,
    in_each_environment(data_clashes),
    in_each_environment(media_clashes),
    in_each_environment(eval_set_clashes),
    demonstration_clashes,
)
_REAL_RUNS = (
    wire_clashes,
    in_each_environment(_stubs_come_together),
    _engine_clashes,
    layout_clashes,
    part_clashes_of_real_runs,
    _devices_and_gpus_agree,
    rank_gpu_clashes,
    rounding_clashes,
    local_clashes,
    shared_weights_clashes,
)
