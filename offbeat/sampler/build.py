"""From the recipe's sampler section to a policy."""

from offbeat.config.rollouts import InOrderConfig, ReadyFirstConfig
from offbeat.sampler.in_order import InOrder
from offbeat.sampler.policy import Sampler
from offbeat.sampler.ready_first import ReadyFirst


def build_sampler(config: InOrderConfig | ReadyFirstConfig, groups_per_step: int) -> Sampler:
    """The policy the recipe names."""
    match config:
        case InOrderConfig():
            lookahead = (
                config.max_staleness if config.max_lookahead is None else config.max_lookahead
            )
            return InOrder(groups_per_step, config.max_staleness, lookahead)
        case ReadyFirstConfig():
            return ReadyFirst(groups_per_step, config.max_staleness)
