"""Draws how the weights of an episode travel, from which trainer ranks, and what happens to these.

Encoder ranks and their faults have random numbers of their own: all other draws of an episode are
the same with and without them.
"""

import random
from typing import Any, Final

from offbeat.config.limits import encoder_of
from offbeat.config.run import RunConfig
from offbeat.config.trainer_parts import model_is_frozen
from offbeat.plugins.simulation.faults import KINDS, draw_reshard_faults
from offbeat.plugins.simulation.schedule import PlannedFault
from offbeat.plugins.simulation.source_layout import SourceLayout, rank_name

DELTA_SHARE: Final = 0.5
"""Share of the episodes in which engines get what a release changes of the one before."""

RESHARD_SHARE: Final = 0.2
"""Share of the episodes in which every trainer rank sends what it holds."""

LAYOUTS: Final = ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (2, 2), (1, 3))
"""Shards of the language model, and copies of each, in such an episode."""

ENCODERS_SHARE: Final = 0.25
"""Share of the episodes with encoder ranks, where the recipe does not ask for any."""

ENCODERS: Final = (1, 1, 2)
"""Numbers of encoder ranks in such an episode."""

ENCODER_FAULTS: Final = ("rank_killed", "rank_frozen", "bucket_lost")
"""Faults of which one strikes an encoder rank while it sends, in half of these episodes."""

_RESHARD: Final = {"chunk_mib": 16.0, "slowest_mib_s": 1000.0, "slack_s": 0.75}
"""Limits of a fetch, four of which are less than the deadline of a sync."""


def draw_transport(ranks: random.Random, seed: int, base: RunConfig) -> dict[str, Any]:
    """Return how weights travel: from every rank, in one episode of five, or as the recipe says."""
    if model_is_frozen(base):
        return {}
    delta = {"delta": random.Random(f"{seed}/delta").random() < DELTA_SHARE}
    if base.sync.ranks_send or ranks.random() < RESHARD_SHARE:
        return {"transport": "reshard", **delta, **_RESHARD}
    return delta


def draw_senders(
    ranks: random.Random, seed: int, profile: str, config: RunConfig
) -> tuple[SourceLayout, list[PlannedFault]]:
    """Return the ranks that send the weights of an episode, and what happens while they do."""
    encoders = random.Random(f"{seed}/encoders")
    faults, engines = list[PlannedFault](), config.generator.engines
    if config.sync.ranks_send:
        faults = draw_reshard_faults(ranks, profile, steps=config.steps, engines=engines)
    drawn, count = encoders.random() < ENCODERS_SHARE, encoders.choice(ENCODERS)
    encoder_ranks = count if drawn or encoder_of(config.trainer) is not None else 0
    layout = SourceLayout(*ranks.choice(LAYOUTS), encoder_ranks)
    return layout, faults + _encoder_faults(encoders, profile, config, layout)


def _encoder_faults(
    encoders: random.Random, profile: str, config: RunConfig, layout: SourceLayout
) -> list[PlannedFault]:
    """Return a fault of one encoder rank while it sends, in one of two episodes that have some."""
    names = [name for name in ENCODER_FAULTS if profile in ("all", KINDS[name].profile)]
    if not config.sync.ranks_send or not layout.encoders or not names:
        return []
    if encoders.random() < 0.5:  # noqa: PLR2004
        return []
    rank = encoders.randrange(layout.language_ranks, layout.ranks)
    at_step = encoders.randint(0, max(0, config.steps - 4))
    delay_s = round(encoders.uniform(0.0, 4.0), 3)
    name = encoders.choice(names)
    return [PlannedFault(name, rank_name(rank), at_step=at_step, delay_s=delay_s)]
