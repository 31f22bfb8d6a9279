"""A new controller with what the one before it had spooled: all three ends of a ready group occur."""

import pytest

from offbeat.config.run import RunConfig
from offbeat.controller.events import Dispatched, Opened, Returned, StepApplied
from offbeat.controller.ledger import Ledger
from offbeat.plugins.simulation.campaign import violations_of
from offbeat.plugins.simulation.draws import EpisodePlan
from offbeat.plugins.simulation.episode import EpisodeResult, play
from offbeat.plugins.simulation.schedule import PlannedFault

CRASHES = range(40, 100, 8)  # journal records
CONFIG = RunConfig.model_validate(
    {
        "steps": 6,
        "groups_per_step": 4,
        "samples_per_group": 2,
        "model": {"path": "none"},
        "sampler": {"name": "ready_first", "max_staleness": 2},
        "stub": {"median_rollout_s": 0.1, "step_s": 2.0},
        "checkpoint": {"interval": 2},
    }
)


def crashed(at_record: int, action: str, *, spools: bool) -> EpisodeResult:
    planned_faults = [PlannedFault(action, at_record=at_record)]
    result = play(3, EpisodePlan(CONFIG, planned_faults, prompts=None, spools=spools, workers=2))
    assert (result.outcome, result.fired) == ("finished", [action]), result.error
    assert violations_of(result) == []
    return result


def ends_of(result: EpisodeResult) -> tuple[set[int], set[int]]:
    """Of the groups ready as the second incarnation began: trained as they were, and said to be lost."""
    events = result.journal
    second = next(
        at for at, each in enumerate(events) if isinstance(each, Opened) and each.incarnation == 2
    )
    held = Ledger.fold(events[:second])
    waiting = set(held.ready) | set(held.training)
    again, lost, trained = set[int](), set[int](), set[int]()
    for event in events[second:]:
        match event:
            case Dispatched():
                again.add(event.prompt_index)
            case Returned(reason="payload_lost"):
                lost.add(event.prompt_index)
            case StepApplied():
                trained |= set(event.prompt_indices) - again
            case _:
                pass
    return waiting & trained, lost


@pytest.mark.parametrize("action", ["controller_killed", "cluster_lost"])
def test_what_was_spooled_is_trained_as_it_was_and_the_rest_is_rolled_out_again(
    action: str,
) -> None:
    ends = [ends_of(crashed(record, action, spools=True)) for record in CRASHES]
    assert all(kept.isdisjoint(lost) for kept, lost in ends)
    assert sum(len(kept) for kept, _ in ends) > sum(len(lost) for _, lost in ends) > 0
    assert any(kept and lost for kept, lost in ends), "both within one recovery"


def test_without_a_spool_nothing_that_was_ready_is_trained_as_it_was() -> None:
    for record in CRASHES:
        kept, lost = ends_of(crashed(record, "controller_killed", spools=False))
        # What the trainer had taken already is adopted, not trained.
        assert len(kept) in (0, CONFIG.groups_per_step)
        assert kept.isdisjoint(lost)
