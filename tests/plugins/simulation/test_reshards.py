"""Episodes in which engines fetch releases from the trainer ranks that hold their buckets."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from offbeat.config.run import RunConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.controller.events import EngineLost
from offbeat.plugins.simulation.audit_engines import AuditedFetches
from offbeat.plugins.simulation.audit_world import Findings
from offbeat.plugins.simulation.campaign import violations_of
from offbeat.plugins.simulation.draws import ENCODER_FAULTS, draw_plan
from offbeat.plugins.simulation.episode import EpisodeResult, play
from offbeat.plugins.simulation.records import Ended, EngineDied, Fault, FetchBegan, FetchEnded
from offbeat.plugins.simulation.schedule import PlannedFault
from offbeat.plugins.simulation.source_layout import SourceLayout, rank_name, source_plan

PLAIN = RunConfig(model=ModelConfig(path="none"), steps=12)
BASE = RunConfig.model_validate({**PLAIN.model_dump(), "sync": {"transport": "reshard"}})
WITH_ENCODERS = RunConfig.model_validate(
    BASE.model_dump()
    | {"trainer": {"encoder": {}}, "environment": {"name": "digits", "images": {}}}
)
COPIES, SHARDS = SourceLayout(1, 2), SourceLayout(3, 1)
GRID = SourceLayout(2, 1, encoders=1)
ENCODER = rank_name(2)


def struck(
    layout: SourceLayout, *actions: str, target: str = "", seed: int = 3, **sync: Any
) -> EpisodeResult:
    """An episode in which each of these faults is due at every third step."""
    faults = [PlannedFault(each, target, at_step=step) for step in (2, 5, 8) for each in actions]
    plan = draw_plan(seed, BASE, "none", faults)
    config = plan.config
    config = config.model_copy(update={"sync": config.sync.model_copy(update=sync)})
    result = play(seed, msgspec.structs.replace(plan, config=config, source_layout=layout))
    assert violations_of(result) == []
    return result


def fetches(result: EpisodeResult) -> list[FetchEnded]:
    return [each for each in result.records if isinstance(each, FetchEnded)]


def struck_senders(result: EpisodeResult) -> list[str]:
    return [each.detail for each in result.records if isinstance(each, Fault)]


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


@pytest.mark.parametrize("layout", [SHARDS, GRID])
def test_without_copies_the_fetch_ends_and_a_later_one_loads_the_release(
    layout: SourceLayout,
) -> None:
    found = fetches(struck(layout, "bucket_lost", "bucket_corrupted"))
    problems = {each.problem for each in found}
    assert any("no other rank holds bucket" in each for each in problems)
    assert not found[-1].problem


@pytest.mark.parametrize(
    ("layout", "target"), [(COPIES, ""), (SHARDS, ""), (GRID, rank_name(0)), (GRID, ENCODER)]
)
@pytest.mark.parametrize("action", ["rank_killed", "rank_frozen"])
def test_ranks_that_die_or_hang_cost_no_engine_its_process(
    layout: SourceLayout, target: str, action: str
) -> None:
    result = struck(layout, action, target=target)
    assert (result.outcome, result.fired.count(action)) == ("finished", 3)
    assert not [each for each in result.journal if isinstance(each, EngineLost)]
    assert not target or struck_senders(result) == [target] * 3


@pytest.mark.parametrize(
    ("rank", "tensors"),
    [(0, {"matrix", "vector"}), (1, {"tower matrix", "tower vector"})],
    ids=["language model", "tower"],
)
def test_nobody_of_the_other_side_sends_in_the_place_of_a_rank(
    rank: int, tensors: set[str]
) -> None:
    layout = SourceLayout(1, 1, encoders=1)
    found = fetches(struck(layout, "bucket_lost", target=rank_name(rank)))
    problems = [each.problem for each in found if "no other rank holds bucket" in each.problem]
    lost = {int(each.rsplit(" ", 1)[1]) for each in problems}
    assert lost
    assert tensors_of(layout, lost) <= tensors
    assert not found[-1].problem


def test_an_encoder_rank_sends_in_the_place_of_one_that_holds_the_same_vector() -> None:
    layout = SourceLayout(1, 1, encoders=2)
    result = struck(layout, "bucket_lost", target=rank_name(1))
    assert any(each.resent for each in fetches(result))


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
    assert "ReplicasDiverged: trainer ranks 0 and 1 have different copies" in result.error


def test_a_fifth_of_the_episodes_has_a_reshard_and_all_of_a_recipe_that_asks_for_it() -> None:
    drawn = [draw_plan(seed, PLAIN, "none", []).config.sync.transport for seed in range(100)]
    assert 10 < drawn.count("reshard") < 30
    asked = [draw_plan(seed, BASE, "none", []).config.sync.transport for seed in range(20)]
    assert set(asked) == {"reshard"}


def test_every_bucket_of_a_layout_has_as_many_holders_as_there_are_copies() -> None:
    holders = [len(route.holders) for route in source_plan(SourceLayout(2, 2)).routes]
    assert sorted(set(holders)) == [2, 4]
    assert {len(route.holders) for route in source_plan(SourceLayout(1, 1)).routes} == {1}


def tensors_of(layout: SourceLayout, buckets: Iterable[int]) -> set[str]:
    manifest = source_plan(layout).manifest
    return {manifest.tensors[each.tensor].name for each in manifest.pieces if each.chunk in buckets}


@pytest.mark.parametrize("encoders", [1, 2])
def test_encoder_ranks_hold_the_tower_and_nobody_else_does(encoders: int) -> None:
    layout = SourceLayout(2, 2, encoders)
    plan = source_plan(layout)
    by_rank = [tensors_of(layout, plan.held_by(rank)) for rank in range(layout.ranks)]
    assert by_rank == [{"matrix", "vector"}] * 4 + [{"tower matrix", "tower vector"}] * encoders


def test_a_quarter_of_the_episodes_has_encoder_ranks_and_all_of_a_recipe_with_some() -> None:
    drawn = [draw_plan(seed, BASE, "none", []).source_layout.encoders for seed in range(100)]
    assert 15 < sum(each > 0 for each in drawn) < 35
    asked = {draw_plan(seed, WITH_ENCODERS, "none", []).source_layout.encoders for seed in range(9)}
    assert asked == {1, 2}


def test_encoder_ranks_change_nothing_else_of_an_episode_but_the_faults_that_strike_them() -> None:
    for seed in range(30):
        plain, grid = (draw_plan(seed, base, "all", None) for base in (BASE, WITH_ENCODERS))
        layout = grid.source_layout
        encoder_ranks = {rank_name(each) for each in range(layout.language_ranks, layout.ranks)}
        others = [each for each in grid.planned_faults if each.target not in encoder_ranks]
        assert others == [each for each in plain.planned_faults if each in others]
        assert plain.source_layout in (layout, SourceLayout(layout.shards, layout.copies))
        assert plain.config.trainer.model_dump() | {"encoder": {}} == (
            grid.config.trainer.model_dump() | {"encoder": {}}
        )


def test_half_of_the_episodes_with_encoder_ranks_strike_one_while_it_sends() -> None:
    plans = [draw_plan(seed, WITH_ENCODERS, "all", None) for seed in range(100)]
    struck_ = [
        each.action
        for plan in plans
        for each in plan.planned_faults
        if each.target.startswith("trainer rank")
    ]
    assert 35 < len(struck_) < 65
    assert set(struck_) == set(ENCODER_FAULTS)


def audited(*records: FetchBegan | FetchEnded | EngineDied) -> list[str]:
    findings = Findings()
    fetches_ = AuditedFetches(BASE.model_copy(), findings)
    readers = dict(fetches_.list_readers())
    for each in (*records, Ended(1000.0, "finished", 0, (), 0)):
        readers[type(each)](each)
    return [each.invariant for each in findings.violations]


def test_the_auditor_names_a_mixture_another_release_and_a_fetch_without_an_end() -> None:
    began = FetchBegan(1.0, "g", "g-1", 1, 5, "five")
    whole = FetchEnded(2.0, "g", "g-1", 1, "", ("five",), 0)
    assert audited(began, whole) == []
    assert audited(began, msgspec.structs.replace(whole, contents=("five", "missing"))) == ["I7"]
    assert audited(began, msgspec.structs.replace(whole, contents=("six",))) == ["I6"]
    assert audited(began) == ["I9"]
    assert audited(began, EngineDied(2.0, "g", "g-1")) == []
