"""Builds the staleness policy from the recipe's sampler section."""

from pathlib import Path
from typing import assert_never

from offbeat.config.sections.sampler import (
    CustomSamplerConfig,
    InOrderConfig,
    ReadyFirstConfig,
    SamplerConfig,
    WeightFifoConfig,
    WindowedConfig,
)
from offbeat.sampler.custom import load_custom
from offbeat.sampler.in_order import InOrder
from offbeat.sampler.policy import Sampler
from offbeat.sampler.ready_first import ReadyFirst
from offbeat.sampler.weight_fifo import WeightFifo
from offbeat.sampler.windowed import Windowed


def build_sampler(
    config: SamplerConfig, groups_per_step: int, working_dir: Path | None = None
) -> Sampler:
    """The policy the recipe names. A custom one is looked for in ``working_dir`` first.

    Raises:
        SamplerNotLoaded: A custom policy cannot be imported or made.
    """
    staleness = config.max_staleness
    match config:
        case InOrderConfig():
            lookahead = staleness if config.max_lookahead is None else config.max_lookahead
            return InOrder(groups_per_step, staleness, lookahead)
        case ReadyFirstConfig():
            return ReadyFirst(groups_per_step, staleness)
        case WeightFifoConfig():
            return WeightFifo(groups_per_step, staleness)
        case WindowedConfig():
            ratio, freshest = config.over_sampling_ratio, config.freshest_first
            return Windowed(groups_per_step, staleness, ratio, freshest_first=freshest)
        case CustomSamplerConfig():
            return load_custom(config, groups_per_step, working_dir or Path.cwd())
        case _:
            assert_never(config)
