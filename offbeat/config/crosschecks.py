"""Finds combinations of settings that cannot work, and says what to set instead.

Each check takes a whole config and yields clashes; it says what would happen, not only what is
forbidden. A single value out of range is the models' business.
"""

from collections.abc import Iterator
from typing import Final

from offbeat.config.algorithm_checks import algorithm_clashes
from offbeat.config.clash import Clash
from offbeat.config.crosschecks_agent import agent_clashes, agent_limit_clashes
from offbeat.config.crosschecks_data import (
    data_clashes,
    eval_clashes,
    eval_set_clashes,
    in_each_environment,
    mixture_clashes,
)
from offbeat.config.crosschecks_encoder import encoder_clashes, encoder_device_clashes
from offbeat.config.crosschecks_images import image_clashes, image_layout_clashes
from offbeat.config.crosschecks_layout import (
    fleet_clashes,
    layout_clashes,
    rank_clashes,
    rank_gpu_clashes,
)
from offbeat.config.crosschecks_moe import moe_clashes
from offbeat.config.crosschecks_optimizer import rounding_clashes, schedule_clashes
from offbeat.config.crosschecks_rollouts import (
    demonstration_clashes,
    reward_budget_clashes,
    reward_call_clashes,
    reward_function_clashes,
    sample_clashes,
)
from offbeat.config.crosschecks_run_dir import run_dir_clashes
from offbeat.config.crosschecks_sync import sync_clashes, wire_clashes
from offbeat.config.crosschecks_vllm import vllm_clashes
from offbeat.config.graders import GRADERS
from offbeat.config.limits import freeze_patterns, lora_of, max_group_bytes, max_outstanding_groups
from offbeat.config.mixture import has_media
from offbeat.config.run import RunConfig
from offbeat.config.sections.environment import MEDIA_LIMIT
from offbeat.config.sections.generator import GeneratorConfig
from offbeat.config.sections.sampler import CustomSamplerConfig, InOrderConfig, WindowedConfig
from offbeat.config.sections.trainer import TrainerConfig

__all__ = ["Clash", "clashes"]

_MIB = 2**20


def clashes(config: RunConfig, *, dry_run: bool = False) -> Iterator[Clash]:
    """Yield everything about ``config`` that cannot work.

    A dry run needs no backend and no device.
    """
    for check in _ALWAYS:
        yield from check(config)
    if not dry_run:
        for check in _REAL_RUNS:
            yield from check(config)


# --- staleness, buffer and flow ------------------------------------------------------------------


def _staleness_covers_the_sync_interval(config: RunConfig) -> Iterator[Clash]:
    staleness, interval = config.sampler.max_staleness, config.sync.interval
    if staleness < interval - 1:
        yield Clash(
            ("sampler.max_staleness", "sync.interval"),
            f"sampler.max_staleness={staleness} cannot hold with sync.interval={interval}: just before "
            f"a sync, even a fresh sample is {interval - 1} weight versions behind the trainer",
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


def _lookahead_is_within_staleness(config: RunConfig) -> Iterator[Clash]:
    sampler = config.sampler
    if not isinstance(sampler, InOrderConfig) or sampler.max_lookahead is None:
        return
    if sampler.max_lookahead > sampler.max_staleness:
        yield Clash(
            ("sampler.max_lookahead", "sampler.max_staleness"),
            f"sampler.max_lookahead={sampler.max_lookahead} can never be reached: a batch more than "
            f"sampler.max_staleness={sampler.max_staleness} ahead would be too old when it is trained",
            f"Set sampler.max_lookahead to {sampler.max_staleness} or less, or raise "
            "sampler.max_staleness.",
        )


def _in_flight_is_reachable(config: RunConfig) -> Iterator[Clash]:
    max_in_flight, max_outstanding = config.rollout.max_in_flight, max_outstanding_groups(config)
    custom = isinstance(config.sampler, CustomSamplerConfig)  # only it knows its own limit
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


def _sampler_target_names_a_class(config: RunConfig) -> Iterator[Clash]:
    sampler = config.sampler
    if isinstance(sampler, CustomSamplerConfig) and not _names_an_object(sampler.target):
        yield Clash(
            ("sampler.target",),
            f"sampler.target={sampler.target} does not name a class in a module",
            "Write module:Class, as in samplers.mine:ShortestFirst.",
        )


def _names_an_object(target: str) -> bool:
    module, _, name = target.partition(":")
    return name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def _buffer_holds_the_bytes_of_a_step(config: RunConfig) -> Iterator[Clash]:
    group = max_group_bytes(config)
    needed = config.groups_per_step * group
    media = (MEDIA_LIMIT,) if has_media(config) else ()
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
            f"buffer.capacity_mib={config.buffer.capacity_mib:g} holds no step of the largest groups: "
            f"{config.groups_per_step} groups of up to {group / _MIB:.3g} MiB need {needed / _MIB:.4g} MiB",
            f"Set buffer.capacity_mib to {-(-needed // _MIB)} or more, or lower groups_per_step, "
            f"{''.join(f'{key}, ' for key in media)}samples_per_group, generator.max_model_len or "
            "generator.sampling.max_new_tokens.",
        )


def _backoff_grows(config: RunConfig) -> Iterator[Clash]:
    first, longest = config.rollout.backoff_s, config.rollout.backoff_max_s
    if first > longest:
        yield Clash(
            ("rollout.backoff_s", "rollout.backoff_max_s"),
            f"rollout.backoff_s={first:g} is longer than rollout.backoff_max_s={longest:g}, the longest "
            "wait allowed",
            f"Set rollout.backoff_max_s to {first:g} or more.",
        )


# --- sampling and learning -----------------------------------------------------------------------


def _a_response_leaves_room_for_its_prompt(config: RunConfig) -> Iterator[Clash]:
    new, whole = config.generator.sampling.max_new_tokens, config.generator.max_model_len
    if new >= whole:
        yield Clash(
            ("generator.sampling.max_new_tokens", "generator.max_model_len"),
            f"generator.sampling.max_new_tokens={new} leaves no room for a prompt in "
            f"generator.max_model_len={whole}",
            f"Set generator.max_model_len to more than {new}, or "
            f"generator.sampling.max_new_tokens to {whole - 1} or less.",
        )


def _deterministic_decoding_has_one_order(config: RunConfig) -> Iterator[Clash]:
    if not config.generator.deterministic:
        return
    if not config.generator.has_engines:
        return  # ``demonstration_clashes`` says what these need
    if config.generator.engines > 1:
        yield Clash(
            ("generator.deterministic", "generator.engines"),
            f"generator.deterministic=true cannot hold with generator.engines={config.generator.engines}: "
            "which engine serves a group, and with which weights, depends on who is free first",
            "Set generator.engines to 1, or generator.deterministic to false.",
        )
    if not isinstance(config.sampler, InOrderConfig):
        yield Clash(
            ("generator.deterministic", "sampler.name"),
            f"generator.deterministic=true cannot hold with sampler.name={config.sampler.name}: what a "
            "batch is made of depends on when groups happen to finish",
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
    """Return whether advantages come from a teacher, and rewards have no part in them."""
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


# --- files and environment -------------------------------------------------------------------------


_USER_CODE: Final = {
    "function": "the reward function",
    "custom": "your Environment class",
    "agent": "your agent function",
}


def _user_code_is_named(config: RunConfig) -> Iterator[Clash]:
    name, target = config.environment.name, config.environment.target
    what = _USER_CODE.get(name)
    user_code = what is not None
    if config.environment.rewards:
        yield from reward_function_clashes(config.environment)
    elif user_code and target is None and not config.environment.command:
        yield Clash(
            ("environment.target", "environment.name"),
            f"environment.name={name} needs environment.target: nothing names {what}",
            "Set environment.target to module:name, importable from the working directory.",
        )
    elif user_code and target is not None and not all(target.partition(":")):
        if name == "function" and target in GRADERS:
            return
        yield Clash(
            ("environment.target",),
            f"environment.target={target} does not name an object in a module",
            "Write module:name, as in rewards.math:exact_match; built-in rewards of "
            f"environment.name=function: {', '.join(GRADERS)}.",
        )
    elif not user_code and target is not None:
        yield Clash(
            ("environment.target", "environment.name"),
            f"environment.target={target} is not used: environment.name={name} is built in",
            "Set environment.name to function, custom or agent, or leave environment.target out.",
        )


# --- what this version can run -------------------------------------------------------------------


def _devices_and_gpus_agree(config: RunConfig) -> Iterator[Clash]:
    yield from _device_and_gpus("generator", config.generator)
    yield from _device_and_gpus("trainer", config.trainer)


def _device_and_gpus(section: str, config: GeneratorConfig | TrainerConfig) -> Iterator[Clash]:
    if config.backend == "stub":
        return
    device, gpus = config.device, config.gpus
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        yield Clash(
            (f"{section}.device",),
            f"{section}.device={device} is no device this version runs on",
            "Set it to cpu or cuda.",
        )
    elif kind == "cuda" and gpus == 0:
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


def _adapters_leave_nothing_to_freeze(config: RunConfig) -> Iterator[Clash]:
    patterns = freeze_patterns(config)
    if patterns and lora_of(config) is not None:
        yield Clash(
            ("trainer.freeze", "trainer.lora"),
            f"trainer.freeze={list(patterns)} has nothing to freeze beside trainer.lora, which trains "
            "adapters alone: the whole model is frozen already",
            "Leave trainer.freeze out and name modules in trainer.lora.target_modules, or leave "
            "trainer.lora out.",
        )


_ALWAYS = (
    _staleness_covers_the_sync_interval,
    sync_clashes,
    fleet_clashes,
    rank_clashes,
    _lookahead_is_within_staleness,
    _in_flight_is_reachable,
    _buffer_holds_the_groups_of_a_step,
    _buffer_holds_what_is_over_sampled,
    _sampler_target_names_a_class,
    _buffer_holds_the_bytes_of_a_step,
    _backoff_grows,
    _a_response_leaves_room_for_its_prompt,
    _deterministic_decoding_has_one_order,
    _a_group_has_something_to_compare,
    sample_clashes,
    _a_filter_lets_something_through,
    algorithm_clashes,
    schedule_clashes,
    _adapters_leave_nothing_to_freeze,
    moe_clashes,
    encoder_clashes,
    run_dir_clashes,
    mixture_clashes,
    in_each_environment(_user_code_is_named),
    in_each_environment(reward_call_clashes),
    reward_budget_clashes,
    in_each_environment(agent_clashes),
    agent_limit_clashes,
    in_each_environment(data_clashes),
    in_each_environment(image_clashes),
    in_each_environment(eval_set_clashes),
    eval_clashes,
    demonstration_clashes,
)
_REAL_RUNS = (
    wire_clashes,
    in_each_environment(_stubs_come_together),
    vllm_clashes,
    layout_clashes,
    image_layout_clashes,
    encoder_device_clashes,
    _devices_and_gpus_agree,
    rank_gpu_clashes,
    rounding_clashes,
)
