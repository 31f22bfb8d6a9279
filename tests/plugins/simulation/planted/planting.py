"""How a bug is planted: a controller whose parts become broken ones, once it has been made."""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from offbeat.config.run import RunConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.controller.controller import Controller
from offbeat.controller.failpoints import Failpoint
from offbeat.plugins.simulation.draws import EpisodePlan, draw_plan
from offbeat.plugins.simulation.schedule import PlannedFault

BASE = RunConfig(model=ModelConfig(path="none"), steps=12)

LOST = frozenset({"I1", "I3", "I9"})
"""A group that nobody knows of: left over at the end, or the run waits for it forever."""

EVERY = {"sync": {"interval": 1}}
SHALLOW = {"sampler": {"name": "ready_first", "max_staleness": 1}, **EVERY}
DEEP = {"sampler": {"name": "ready_first", "max_staleness": 3}, **EVERY}


def become(part: object, broken: type) -> None:
    """The part is of this class from now on; what it holds stays."""
    object.__setattr__(part, "__class__", broken)


def killed_at(point: Failpoint, nth: int) -> PlannedFault:
    return PlannedFault("controller_killed", "controller", failpoint=point, nth=nth)


class Planted(Controller):
    """A controller with one bug, in every incarnation of the run.

    ``breaks``: invariants of which the auditor has to report one. ``profile``, ``settings`` and
    ``planned_faults``: the faults and the recipe under which the bug can show.
    """

    breaks: ClassVar[frozenset[str]]
    profile: ClassVar[str] = "none"
    settings: ClassVar[Mapping[str, Any]] = {}
    planned_faults: ClassVar[tuple[PlannedFault, ...]] = ()  # instead of the profile's
    several_turns: ClassVar[bool] = False  # whether samples have several turns, and branches

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plant()

    def plant(self) -> None:
        """Break something."""
        raise NotImplementedError

    @classmethod
    def plan(cls, seed: int) -> EpisodePlan:
        """An episode in which the bug can show."""
        plan = draw_plan(seed, BASE, cls.profile, list(cls.planned_faults) or None)
        whole = plan.config.model_dump()
        for name, section in cls.settings.items():
            replaces = name == "sampler" or not isinstance(section, dict)
            whole[name] = section if replaces else {**whole[name], **section}
        turns = cls.several_turns or plan.several_turns
        config = RunConfig.model_validate(whole)
        faults = plan.planned_faults
        if not config.sync.canary_interval:  # nothing else sees weights that are computed otherwise
            faults = [each for each in faults if each.action != "load_computes_other"]
        return msgspec.structs.replace(
            plan, config=config, several_turns=turns, planned_faults=faults
        )
