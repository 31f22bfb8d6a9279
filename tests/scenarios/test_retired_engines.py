"""An engine that was retired stays so for the controllers that follow, until the run is resumed."""

from dataclasses import dataclass, field
from typing import Any

from offbeat.controller.events import Joined, Retired
from tests.support.fakes import FakeGenerator, MemoryJournal
from tests.support.scenarios import DiesAfterSync, next_incarnation, outcome, play, use_engine
from tests.support.world import World


@dataclass
class LooksIntoTheJournal(DiesAfterSync):
    """Notes whether its retirement was durable when it was asked to end."""

    journal: MemoryJournal = field(default_factory=MemoryJournal)
    found: list[bool] = field(default_factory=list[bool])

    async def retire(self) -> None:
        durable = self.journal.events[: self.journal.barriers[-1]]
        self.found.append(any(isinstance(event, Retired) for event in durable))
        await super().retire()


def retires_an_engine() -> World:
    world = World({"steps": 100}, engines=3)
    use_engine(world, DiesAfterSync("generator-0"))
    play(world)
    assert world.built.state.fleet.retired == ["generator-0"]
    return world


def goes_on(before: World, driver: str, overrides: dict[str, Any] | None = None) -> World:
    """Return the next controller's world: more steps are asked for, and the actors live on."""
    world = next_incarnation(before, {"steps": 150, **(overrides or {})}, engines=3)
    world.driver = driver
    return world


def test_a_retirement_is_durable_before_the_process_is_ended_for_good() -> None:
    world = World({"steps": 100}, engines=3)
    engine = use_engine(world, LooksIntoTheJournal("generator-0"))
    engine.journal = world.journal
    play(world)
    assert engine.found == [True]
    (event,) = world.events(Retired)
    assert event.engine == "generator-0"
    assert "generator-0" in event.reason, "its last failure"


def test_the_next_controller_neither_starts_nor_waits_for_a_retired_engine() -> None:
    before = retires_an_engine()
    engine = before.generators["generator-0"]
    starts, known = engine.restarts, len(before.journal.events)
    world = goes_on(before, driver="")
    play(world)
    assert len(world.trainer.steps) == 150
    assert world.built.state.fleet.retired == ["generator-0"]
    assert engine.restarts == starts
    joined = [e.name for e in world.journal.events[known:] if isinstance(e, Joined)]
    assert "generator-0" not in joined
    summary = world.built.progress.summary("run", "finished", None)
    assert summary.engines_retired == ["generator-0"]


def test_the_next_controller_counts_a_retired_engine_as_one_that_is_gone() -> None:
    """No more engines are retired than leave ``generator.min_engines``, over all controllers."""
    limits = {"generator": {"min_engines": 2, "restart_budget": 2}}
    world = goes_on(retires_an_engine(), driver="", overrides=limits)
    use_engine(world, DiesAfterSync("generator-1"))
    error, _ = outcome(world)
    assert "generator.restart_budget" in str(error)
    assert world.built.state.fleet.retired == ["generator-0"]


def test_a_resumed_run_has_a_new_engine_for_a_retired_one() -> None:
    world = goes_on(retires_an_engine(), driver="another")
    use_engine(world, FakeGenerator("generator-0"))
    play(world)
    assert world.built.state.fleet.retired == []
    summary = world.built.progress.summary("run", "finished", None)
    assert summary.engines_retired == []
