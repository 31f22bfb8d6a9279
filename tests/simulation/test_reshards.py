"""Episodes in which engines fetch releases from the trainer ranks that hold their buckets."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from offbeat.config.run import RunConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.controller.events import EngineLost
from offbeat.simulation.audit_fetches import AuditedFetches
from offbeat.simulation.audit_findings import Findings
from offbeat.simulation.campaign import violations_of
from offbeat.simulation.draws import draw_plan
from offbeat.simulation.episode import EpisodeResult, play
from offbeat.simulation.quiet_log import quiet_log
from offbeat.simulation.records import Ended, EngineDied, FetchBegan, FetchEnded
from offbeat.simulation.schedule import PlannedFault
from offbeat.simulation.source_ranks import source_plan

PLAIN = RunConfig(model=ModelConfig(path="none"), steps=12)
BASE = RunConfig.model_validate({**PLAIN.model_dump(), "sync": {"transport": "reshard"}})
COPIES, SHARDS = (1, 2), (3, 1)


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    with quiet_log():
        yield


def struck(layout: tuple[int, int], *actions: str, seed: int = 3, **sync: Any) -> EpisodeResult:
    """An episode in which each of these faults is due at every third step."""
    faults = [PlannedFault(each, "", at_step=step) for step in (2, 5, 8) for each in actions]
    plan = draw_plan(seed, BASE, "none", faults)
    config = plan.config
    config = config.model_copy(update={"sync": config.sync.model_copy(update=sync)})
    result = play(seed, msgspec.structs.replace(plan, config=config, source_layout=layout))
    assert violations_of(result) == []
    return result


def fetches(result: EpisodeResult) -> list[FetchEnded]:
    return [each for each in result.records if isinstance(each, FetchEnded)]


def test_every_bucket_of_a_quiet_run_comes_once_and_from_the_planned_rank() -> None:
    result = struck(COPIES)
    assert result.outcome == "finished"
    assert {(each.problem, each.resent) for each in fetches(result)} == {("", 0)}
    assert all(len(each.contents) == 1 for each in fetches(result))


@pytest.mark.parametrize("action", ["rank_killed", "bucket_lost", "bucket_corrupted"])
def test_what_one_rank_does_not_send_is_sent_by_one_that_holds_a_copy(action: str) -> None:
    result = struck(COPIES, action)
    assert action in result.fired
    assert any(each.resent and not each.problem for each in fetches(result))


def test_without_copies_the_fetch_ends_and_a_later_one_loads_the_release() -> None:
    found = fetches(struck(SHARDS, "bucket_lost", "bucket_corrupted"))
    problems = {each.problem for each in found}
    assert any("no other rank holds bucket" in each for each in problems)
    assert not found[-1].problem


@pytest.mark.parametrize("layout", [COPIES, SHARDS])
@pytest.mark.parametrize("action", ["rank_killed", "rank_frozen"])
def test_ranks_that_die_or_hang_cost_no_engine_its_process(
    layout: tuple[int, int], action: str
) -> None:
    result = struck(layout, action)
    assert (result.outcome, result.fired.count(action)) == ("finished", 3)
    assert not [each for each in result.journal if isinstance(each, EngineLost)]


def test_a_bucket_that_comes_twice_or_late_changes_nothing() -> None:
    result = struck(COPIES, "bucket_doubled", "bucket_late")
    assert {"bucket_doubled", "bucket_late"} <= set(result.fired)
    assert {each.problem for each in fetches(result)} == {""}


def test_an_engine_that_restarts_between_two_buckets_fetches_the_release_alone() -> None:
    result = struck(COPIES, "fetch_kills")
    began = [each for each in result.records if isinstance(each, FetchBegan)]
    reborn = [each for each in began if not each.incarnation.endswith("-1")]
    ended = {(each.engine, each.incarnation, each.epoch): each.problem for each in fetches(result)}
    assert reborn
    assert ended[reborn[0].engine, reborn[0].incarnation, reborn[0].epoch] == ""


def test_diverged_copies_end_the_run_by_name_before_they_are_published() -> None:
    result = struck(COPIES, "copies_diverge")
    assert result.outcome == "failed"
    assert "ReplicasDiverged: trainer ranks 0 and 1 hold copies" in result.error


def test_a_fifth_of_the_episodes_has_a_reshard_and_all_of_a_recipe_that_asks_for_it() -> None:
    drawn = [draw_plan(seed, PLAIN, "none", []).config.sync.transport for seed in range(100)]
    assert 10 < drawn.count("reshard") < 30
    asked = [draw_plan(seed, BASE, "none", []).config.sync.transport for seed in range(20)]
    assert set(asked) == {"reshard"}


def test_every_bucket_of_a_layout_has_as_many_holders_as_there_are_copies() -> None:
    holders = [len(route.holders) for route in source_plan(2, 2).routes]
    assert sorted(set(holders)) == [2, 4]
    assert {len(route.holders) for route in source_plan(1, 1).routes} == {1}


def audited(*records: FetchBegan | FetchEnded | EngineDied) -> list[str]:
    findings = Findings()
    fetches_ = AuditedFetches(BASE.model_copy(), findings)
    for each in records:
        fetches_.handlers[type(each)](each)
    fetches_.check_end(Ended(1000.0, "finished", 0, (), 0))
    return [each.invariant for each in findings.violations]


def test_the_auditor_names_a_mixture_another_release_and_a_fetch_without_an_end() -> None:
    began = FetchBegan(1.0, "g", "g-1", 1, 5, "five")
    whole = FetchEnded(2.0, "g", "g-1", 1, "", ("five",), 0)
    assert audited(began, whole) == []
    assert audited(began, msgspec.structs.replace(whole, contents=("five", "missing"))) == ["I7"]
    assert audited(began, msgspec.structs.replace(whole, contents=("six",))) == ["I6"]
    assert audited(began) == ["I9"]
    assert audited(began, EngineDied(2.0, "g", "g-1")) == []
