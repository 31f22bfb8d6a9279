"""Draws combinations of settings and faults that have stalled runs before.

Drawn independently, they coincide in less than one episode of a hundred: a buffer that holds hardly
more than a step, a policy that needs the groups of one step before those of the next, and a loss of
what the buffer holds. The loss of a machine with engines, without another fault, is as rare.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from offbeat.controller.failpoints import Failpoint
from offbeat.plugins.simulation.schedule import PlannedFault

CORNER_SHARE: Final = 0.05
MACHINE: Final = "machine-1"
"""Machine on which the workers of a corner are, and with them the groups that they finished."""
LONE_LOSS_SHARES: Final[Mapping[str, float]] = {"all": 0.08, "machines": 0.2}
"""Shares of the episodes, by profile, in which engines are lost and nothing else fails."""
LONE_LOSS_SETTINGS: Final[dict[str, Any]] = {"stub": {"step_s": 5.0, "tail_sigma": 0.4}}
"""Settings of these episodes: steps so long that the run outlasts the verdict on the machine, and no
rollout for which healthy engines may keep the trainer waiting as long."""

_BUFFER_STEPS: Final = (1.0, 1.0, 1.1, 1.4)
_LOSSES: Final = ("machine_lost", "machine_lost", "machine_cut_off")
_OTHERS: Final = (
    "controller_killed",
    "gradient_nan",
    "microbatch_raises",
    "trainer_killed",
    "worker_killed",
)
_POINTS: Final = (Failpoint.CHUNK_SENT, Failpoint.APPLIED, Failpoint.CLEARED)


class Corner(msgspec.Struct, frozen=True):
    """Special settings and faults of an episode; none, by default."""

    sampler: dict[str, Any] | None = None
    # Groups that the buffer holds beyond those of a step; None: as many as the sampler can use
    more_groups: int | None = None
    # Sizes of the buffer to draw from, in steps of the largest groups; empty: any
    buffer_steps: tuple[float, ...] = ()
    faults: list[PlannedFault] = []

    def settings(self, groups_per_step: int) -> dict[str, Any]:
        """Return what it changes of a run, by section."""
        if self.sampler is None:
            return {}
        more = self.more_groups
        capacity = None if more is None else groups_per_step + more
        return {"sampler": self.sampler, "buffer": {"capacity_groups": capacity}}

    def machines(self, workers: list[str]) -> dict[str, str]:
        """Return the machine of each of the workers whose machine it loses."""
        return dict.fromkeys(workers, MACHINE) if self.faults else {}


def draw_corner(rng: random.Random, profile: str, staleness: int, *, steps: int) -> Corner:
    """Draw a corner for one episode of twenty; the others get one in which nothing is special.

    Args:
        rng: Random numbers of its own: the other draws of an episode do not depend on it.
        profile: Name of the set of faults.
        staleness: ``max_staleness`` of the episode; its corner allows at least 1.
        steps: Steps of the episode. The last ones have no faults.
    """
    if rng.random() >= CORNER_SHARE:
        return Corner()
    bound = max(1, staleness)
    lookahead, is_scarce_in_bytes = rng.randint(1, bound), rng.random() < 0.5  # noqa: PLR2004
    return Corner(
        {"name": "in_order", "max_staleness": bound, "max_lookahead": lookahead},
        None if is_scarce_in_bytes else rng.choice((0, 0, 1, 3)),
        _BUFFER_STEPS if is_scarce_in_bytes else (),
        _faults(rng, profile, steps),
    )


def _faults(rng: random.Random, profile: str, steps: int) -> list[PlannedFault]:
    """Draw one or two losses of the machine with the buffer, and in ``all`` one other fault."""
    if profile not in ("all", "machines"):
        return []
    latest = max(1, steps - 4)
    faults = [
        PlannedFault(
            rng.choice(_LOSSES),
            MACHINE,
            at_step=rng.randint(0, latest),
            delay_s=round(rng.uniform(0.0, 3.0), 3),
        )
        for _ in range(rng.randint(1, 2))
    ]
    if profile == "all":
        if rng.random() < 0.3:  # noqa: PLR2004
            dies, point = rng.choice(("controller_killed", "trainer_killed")), rng.choice(_POINTS)
            faults.append(PlannedFault(dies, failpoint=point, nth=rng.randint(1, 12)))
        else:
            faults.append(PlannedFault(rng.choice(_OTHERS), at_step=rng.randint(0, latest)))
    return faults


def draw_lone_loss(
    rng: random.Random, profile: str, engines: Sequence[str], machines: Mapping[str, str]
) -> tuple[PlannedFault, dict[str, str]] | None:
    """Draw an early loss of the machine with some but not all engines, for some of the episodes.

    It is the one fault of its episode. Return it with the machine of each actor.

    Args:
        rng: Random numbers that no other draw uses.
        profile: Name of the set of faults.
        engines: Names of all engines.
        machines: Machine of each actor; the lost machine keeps none of these actors.
    """
    if rng.random() >= LONE_LOSS_SHARES.get(profile, 0.0):
        return None
    lost = rng.sample(engines, rng.randint(1, len(engines) - 1))
    kept = {actor: machine for actor, machine in machines.items() if machine != MACHINE}
    at_step, delay_s = rng.randint(0, 3), round(rng.uniform(0.0, 5.0), 3)
    fault = PlannedFault(rng.choice(_LOSSES), MACHINE, at_step=at_step, delay_s=delay_s)
    return fault, kept | dict.fromkeys(lost, MACHINE)
