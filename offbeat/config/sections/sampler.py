"""Defines section ``sampler`` of a recipe."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from offbeat.config.base import Config, Options, default_choice
from offbeat.config.problems import Clash, target_clashes


def count_trainable_groups(steps_ahead: int, groups_per_step: int) -> int:
    """Return how many groups the present step and ``steps_ahead`` further steps train."""
    return (steps_ahead + 1) * groups_per_step


class InOrderConfig(Config):
    """Train exactly the prompts of each batch, in order; reproducible."""

    name: Literal["in_order"] = "in_order"
    """Name of the policy."""

    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Maximum weight versions between a sample's oldest token and training on it. 0 is synchronous.
    Higher values let engines run further ahead, so samples are more off-policy."""

    max_lookahead: Annotated[int, Field(ge=0)] | None = None
    """Maximum batches generated ahead of the one in training. null: `max_staleness`. Fewer batches
    give fresher samples; more hide longer rollouts."""

    def find_clashes(self) -> Iterator[Clash]:
        if self.max_lookahead is not None and self.max_lookahead > self.max_staleness:
            yield Clash(
                ("sampler.max_lookahead", "sampler.max_staleness"),
                f"sampler.max_lookahead={self.max_lookahead} can never be reached: a batch more than "
                f"sampler.max_staleness={self.max_staleness} ahead would be too old when it is trained",
                f"Set sampler.max_lookahead to {self.max_staleness} or less, or raise "
                "sampler.max_staleness.",
            )


class ReadyFirstConfig(Config):
    """Train ready groups in arrival order, and admit so few that only failures discard groups."""

    name: Literal["ready_first"] = "ready_first"
    """Name of the policy."""

    max_staleness: Annotated[int, Field(ge=0)] = 1
    """Maximum weight versions between a sample's oldest token and training on it. 0 is synchronous;
    1 usually hides generation behind training."""


class WeightFifoConfig(Config):
    """Train in order of weight version: groups with older weights are always trained first."""

    name: Literal["weight_fifo"] = "weight_fifo"
    """Name of the policy."""

    max_staleness: Annotated[int, Field(ge=0)] = 1
    """Maximum weight versions between a sample's oldest token and training on it. 0 is synchronous.
    Higher values let engines run further ahead, so samples are more off-policy."""


class WindowedConfig(Config):
    """Train any ready group within the window; generate more than needed, and discard late groups."""

    name: Literal["windowed"] = "windowed"
    """Name of the policy."""

    max_staleness: Annotated[int, Field(ge=0)] = 1
    """The window: maximum weight versions between a sample's oldest token and training on it. A
    wider window discards fewer long rollouts."""

    over_sampling_ratio: Annotated[float, Field(ge=1)] = 1.0
    """Groups admitted at once, as a multiple of the groups that the window can train. With a
    higher ratio the trainer waits less for slow rollouts, but more groups are discarded."""

    freshest_first: bool = False
    """Train the newest versions first, not in arrival order. Samples are less off-policy, but more
    long rollouts are evicted."""

    on_evicted: Literal["readmit", "drop"] = "readmit"
    """What happens to groups that grew too old. readmit: roll the prompt out again. drop: count it
    as `stale`; training then sees fewer prompts with long responses."""


class CustomSamplerConfig(Config):
    """A staleness policy from your module.

    A class with the methods of ``offbeat.sampler.policy.Sampler``.
    """

    name: Literal["custom"] = "custom"
    """Name of the policy."""

    target: str
    """`module:Class`, importable from the working directory. It is called with the keyword
    arguments `groups_per_step`, `max_staleness` and `options`."""

    max_staleness: Annotated[int, Field(ge=0)] = 1
    """Maximum weight versions between a sample's oldest token and training on it. It is checked
    when a group is trained."""

    options: Options = {}
    """Further keyword arguments of the class."""

    def find_clashes(self) -> Iterator[Clash]:
        hint = "Write module:Class, as in samplers.mine:ShortestFirst."
        yield from target_clashes("sampler.target", self.target, "a class", hint)


SamplerConfig = Annotated[
    InOrderConfig | ReadyFirstConfig | WeightFifoConfig | WindowedConfig | CustomSamplerConfig,
    Field(discriminator="name"),
    default_choice("name", "ready_first"),
]


class FilterConfig(Config):
    """Finished groups that are not worth a place in a batch: dropped by reason, and replaced."""

    zero_variance: bool = False
    """Drop groups whose samples all have the same reward, and generate others (dynamic
    sampling)."""

    max_truncated_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    """Drop groups with a larger share of samples that ran out of tokens. null: keep them."""

    max_per_step: Annotated[int, Field(ge=1)] | None = None
    """Maximum groups filtered per step. Further groups are kept, so arrival order decides which
    groups are dropped. null: 10 times `groups_per_step`."""
