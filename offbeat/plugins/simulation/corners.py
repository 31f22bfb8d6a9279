"""Draws combinations of settings and faults that have stalled runs before.

One combination is a buffer hardly larger than a step, a policy that needs the groups of one step
before the next step's, and a loss of the buffer's groups. Independent draws combine them in less
than one episode of a hundred. The loss of a machine with engines, without another fault, is as
rare.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from offbeat.controller.failpoints import Failpoint
from offbeat.plugins.simulation.schedule import PlannedFault

CORNER_SHARE: Final = 0.05
MACHINE: Final = "machine-1"
"""Machine of a corner's workers, which also holds the groups that they finished."""
LONE_LOSS_SHARES: Final[Mapping[str, float]] = {"all": 0.08, "machines": 0.2}
"""Shares of the episodes, by profile, in which engines are lost and nothing else fails."""
LONE_LOSS_SETTINGS: Final[dict[str, Any]] = {"stub": {"step_s": 5.0, "tail_sigma": 0.4}}
"""Settings of these episodes. Steps are so long that the run outlasts the verdict on the machine.
No rollout lasts so long that healthy engines may keep the trainer waiting until then."""

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
    """Special settings and faults of an episode. The default has none."""

    sampler: dict[str, Any] | None = None
    # Groups in the buffer beyond one step's; None: as many as the sampler can use
    more_groups: int | None = None
    # Sizes of the buffer to draw from, in steps of the largest groups; empty: any
    buffer_steps: tuple[float, ...] = ()
    faults: list[PlannedFault] = []

    def settings(self, groups_per_step: int) -> dict[str, Any]:
        """Return the changed settings of a run, by section."""
        if self.sampler is None:
            return {}
        more = self.more_groups
        capacity = None if more is None else groups_per_step + more
        return {"sampler": self.sampler, "buffer": {"capacity_groups": capacity}}

    def machines(self, workers: list[str]) -> dict[str, str]:
        """Return the machine of each worker, if the corner loses the workers' machine."""
        return dict.fromkeys(workers, MACHINE) if self.faults else {}


def draw_corner(rng: random.Random, profile: str, staleness: int, *, steps: int) -> Corner:
    """Draw a corner for one episode of twenty, and a neutral one for the others.

    Args:
        rng: Separate random numbers, on which the other draws of an episode do not depend.
        profile: Name of the set of faults.
        staleness: ``max_staleness`` of the episode. Its corner allows at least 1.
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
    """Draw one or two losses of the buffer's machine, and in ``all`` one other fault."""
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

    It is the only fault of its episode. Return it with the machine of each actor.

    Args:
        rng: Random numbers that no other draw uses.
        profile: Name of the set of faults.
        engines: Names of all engines.
        machines: Machine of each actor. The lost machine keeps none of these actors.
    """
    if rng.random() >= LONE_LOSS_SHARES.get(profile, 0.0):
        return None
    lost = rng.sample(engines, rng.randint(1, len(engines) - 1))
    kept = {actor: machine for actor, machine in machines.items() if machine != MACHINE}
    at_step, delay_s = rng.randint(0, 3), round(rng.uniform(0.0, 5.0), 3)
    fault = PlannedFault(rng.choice(_LOSSES), MACHINE, at_step=at_step, delay_s=delay_s)
    return fault, kept | dict.fromkeys(lost, MACHINE)
