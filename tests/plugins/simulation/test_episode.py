"""Whole episodes: the very controller of a real run among the fakes, audited."""

import functools
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from offbeat.config.crosschecks import clashes
from offbeat.config.limits import max_group_bytes
from offbeat.config.loader import load_recipe
from offbeat.config.run import RunConfig
from offbeat.controller.events import Dropped, StepApplied
from offbeat.plugins.simulation import schedule
from offbeat.plugins.simulation.campaign import run_campaign, violations_of
from offbeat.plugins.simulation.cli import replay_command
from offbeat.plugins.simulation.draws import EpisodePlan, draw_plan, extend_deadlines
from offbeat.plugins.simulation.episode import EpisodeResult, play, run_episode
from offbeat.plugins.simulation.faults import ENDS_RUN, KINDS, OF_RESHARD
from offbeat.plugins.simulation.records import Generated, PermitsUsed, StepReported
from offbeat.plugins.simulation.schedule import PlannedFault

BASE = RunConfig.model_validate({"steps": 12, "groups_per_step": 8, "model": {"path": "none"}})
QUICKSTART = Path(__file__).resolve().parents[3] / "recipes" / "quickstart.yaml"
SAMPLERS = ("in_order", "ready_first", "weight_fifo", "windowed")


RESHARD = {"transport": "reshard", "chunk_mib": 16.0, "slowest_mib_s": 1000.0, "slack_s": 0.75}
PICTURES = {"images": {"max_mib": 1.0}}


def plan_with(**changes: object) -> EpisodePlan:
    """A quiet run of three engines, in order, with a checkpoint every third step."""
    config = {
        **BASE.model_dump(),
        "sampler": {"name": "in_order", "max_staleness": 1},
        "samples_per_group": 2,
        **changes,
    }
    quick: dict[str, dict[str, object]] = {
        "generator": {"engines": 3, "start_deadline_s": 30.0, "restart_budget": 60},
        "trainer": {"step_deadline_s": 10.0, "start_deadline_s": 40.0, "restart_budget": 20},
        "rollout": {"deadline_s": 15.0, "drop_budget": 40, "data_retries": 3},
        "checkpoint": {"interval": 3, "keep": 2, "deadline_s": 10.0},
        "sync": {"deadline_s": 8.0, "canary_interval": 1},
        "supervision": {"stall_timeout_s": 120.0, "controller_restart_budget": 12},
    }
    for section, values in quick.items():
        config[section] = {**config[section], **values}  # type: ignore[dict-item]
    machines = {"generator-1": "machine-1", "environment-1": "machine-1", "trainer": "machine-2"}
    return EpisodePlan(RunConfig.model_validate(config), [], None, True, 2, machines=machines)  # noqa: FBT003


@functools.cache
def struck(*planned_faults: PlannedFault) -> EpisodeResult:
    faults, plan = list(planned_faults), plan_with()
    config = extend_deadlines(plan.config, faults)
    return play(7, msgspec.structs.replace(plan, config=config, planned_faults=faults))


def trained(result: EpisodeResult) -> list[tuple[int, ...]]:
    """The groups of each version, as the last controller's ledger has them, sorted."""
    steps: dict[int, tuple[int, ...]] = {}
    for event in result.journal:
        if isinstance(event, StepApplied):
            steps[event.version] = tuple(sorted(event.prompt_indices))
    return [steps[version] for version in sorted(steps)]


@pytest.mark.parametrize("name", SAMPLERS)
def test_without_faults_every_policy_trains_all_its_steps_and_breaks_nothing(name: str) -> None:
    result = play(1, plan_with(sampler={"name": name, "max_staleness": 2}))
    assert violations_of(result) == []
    assert (result.outcome, len(trained(result))) == ("finished", 12)


def test_the_same_seed_is_the_same_history_and_another_one_is_not() -> None:
    digests = [run_episode(seed, BASE).digest for seed in (3, 4, 3)]
    assert digests[0] == digests[2] != digests[1]


def test_every_drawn_run_is_one_that_a_recipe_may_ask_for() -> None:
    for seed in range(200):
        plan = draw_plan(seed, BASE, "all", None)
        assert not list(clashes(plan.config, dry_run=True))
        assert plan.config.steps >= 12 and plan.config.groups_per_step >= 8
        assert plan.config.generator.engines >= 3


def test_a_seed_draws_the_same_plan_whatever_was_drawn_before() -> None:
    def draw(seeds: Iterable[int]) -> dict[int, EpisodePlan]:
        return {seed: draw_plan(seed, BASE, "all", None) for seed in seeds}

    assert draw(range(60)) == draw(reversed(range(60)))


def test_on_average_three_faults_and_more_fire() -> None:
    fired = [len(run_episode(seed, BASE).fired) for seed in range(20)]
    assert sum(fired) / len(fired) >= 3


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fault_fires_and_the_run_survives_it(kind: str) -> None:
    targets = {"engine": "generator-1", "worker": "environment-0", "controller": "controller"}
    target = targets.get(KINDS[kind].target, "trainer" if "trainer" in kind else "")
    planned_faults = [PlannedFault(kind, target, at_step=2)]
    if kind == "engine_born_late":
        planned_faults.append(PlannedFault("engine_killed", target, at_step=3))
    plan = plan_with(sync=RESHARD) if kind in OF_RESHARD else plan_with()
    config = extend_deadlines(plan.config, planned_faults)
    result = play(7, msgspec.structs.replace(plan, config=config, planned_faults=planned_faults))
    assert kind in result.fired
    end = "failed" if kind in ENDS_RUN else "finished"
    assert (result.outcome, violations_of(result)) == (end, [])


@pytest.mark.parametrize("kind", ["engine_frozen", "worker_killed", "trainer_killed", "partition"])
def test_a_strike_without_a_target_finds_a_victim(kind: str) -> None:
    result = struck(PlannedFault(kind, at_step=2))
    assert (result.fired, result.outcome) == ([kind], "finished")


@pytest.mark.parametrize("percent", range(0, 100, 14))
def test_a_controller_killed_at_any_record_comes_to_the_same_weights(percent: int) -> None:
    """With several engines and a canary in each sync; ``test_crash_points`` kills at more records."""
    quiet = struck()
    record = 1 + percent * len(quiet.journal) // 100
    result = struck(PlannedFault("controller_killed", at_record=record))
    assert result.fired == ["controller_killed"]
    assert violations_of(result) == []
    assert trained(result) == trained(quiet)
    assert result.weights == quiet.weights


def test_a_cluster_that_is_lost_as_a_whole_is_taken_up_from_the_run_directory() -> None:
    result = struck(PlannedFault("cluster_lost", at_step=7, delay_s=0.2))
    assert violations_of(result) == []
    assert result.weights == struck().weights


def test_a_schedule_survives_its_file() -> None:
    planned_faults = draw_plan(11, BASE, "all", None).planned_faults
    assert schedule.load(schedule.dump(planned_faults)) == planned_faults


@pytest.mark.parametrize("when", [{}, {"at_step": 1, "failpoint": "applied"}])
def test_a_strike_needs_exactly_one_moment(when: dict[str, object]) -> None:
    text = msgspec.json.encode([{"action": "engine_killed", **when}])
    with pytest.raises(msgspec.ValidationError, match="exactly one"):
        schedule.load(text)


def test_a_campaign_counts_its_episodes_and_what_was_reached() -> None:
    *_, tally = run_campaign(BASE, range(4), "none", workers=1)
    assert (tally.episodes, tally.outcomes, tally.fired) == (4, {"finished": 4}, {})
    assert tally.reached["applied"] == 4


def test_the_command_that_plays_an_episode_again_has_the_overrides_of_the_campaign() -> None:
    recipe = ("recipes/quickstart.yaml", "sync.transport=reshard", "name=two words")
    assert replay_command(recipe, "all", Path("faults.json")) == (
        "offbeat simulate recipes/quickstart.yaml sync.transport=reshard 'name=two words' "
        "--faults all --schedule faults.json"
    )


def test_samples_of_several_turns_and_branches_go_on_under_new_weights_and_are_trained() -> None:
    plan = msgspec.structs.replace(plan_with(), several_turns=True)
    kill = PlannedFault("engine_killed", "generator-0", at_step=3)
    result = play(5, msgspec.structs.replace(plan, planned_faults=[kill]))
    assert (result.outcome, violations_of(result)) == ("finished", [])
    groups = [each for each in result.records if isinstance(each, Generated)]
    drawn = [each.samples for each in groups]
    assert {turns for each in drawn for turns in each.turns} == {1, 2, 3}
    assert {branches for each in drawn for branches in each.branches} == {1, 2, 3}
    assert any(len(spans) > 1 for group in groups for spans in group.spans)
    reported = [each for each in result.records if isinstance(each, StepReported)]
    assert len(reported) == 12 and all(each.branches_mean > 1 for each in reported)


def test_pictures_fill_the_buffer_to_its_last_byte_and_the_run_goes_on_under_faults() -> None:
    """The buffer has room for one step and a half of groups, most of it for their pictures."""
    group = max_group_bytes(plan_with(environment=PICTURES).config)
    room = {"capacity_mib": 1.5 * BASE.groups_per_step * group / 2**20}
    plan = plan_with(environment=PICTURES, buffer=room)
    kills = [
        PlannedFault("engine_killed", "generator-0", at_step=3),
        PlannedFault("controller_killed", "controller", at_step=5),
    ]
    result = play(5, msgspec.structs.replace(plan, planned_faults=kills))
    assert (result.outcome, violations_of(result)) == ("finished", [])
    groups = [each for each in result.records if isinstance(each, Generated)]
    assert max(each.samples.media_bytes for each in groups) == 2**20
    held = max(each.held_bytes for each in result.records if isinstance(each, PermitsUsed))
    assert held > 4 * group


def test_prompts_are_dropped_for_their_pictures_and_the_auditor_knows_the_reasons() -> None:
    plan = plan_with(environment=PICTURES)
    rollout = plan.config.rollout.model_copy(update={"data_retries": 0})
    config = plan.config.model_copy(update={"rollout": rollout})
    faults = [PlannedFault("reward_raises", at_step=step) for step in range(8)]
    reasons = set[str]()
    for seed in range(3):
        struck_plan = msgspec.structs.replace(plan, config=config, planned_faults=faults)
        result = play(seed, struck_plan)
        assert (result.outcome, violations_of(result)) == ("finished", [])
        reasons |= {event.detail for event in result.journal if isinstance(event, Dropped)}
    assert reasons == {"reward_raised", "picture_token", "picture_unusable"}


@pytest.mark.parametrize("seed", [500677, 500726])
def test_a_refused_step_takes_no_prompts_from_the_run_that_its_next_batch_has(seed: int) -> None:
    """Under ``in_order``, with ``shrink``, the prompts at their end: the run used to end here."""
    result = run_episode(seed, load_recipe(QUICKSTART).config)
    assert (result.outcome, violations_of(result)) == ("finished", [])


def test_a_group_that_is_lost_with_a_machine_gets_room_in_a_full_buffer() -> None:
    """Under ``in_order``; groups with pictures of the next step held the room, and the run stalled."""
    result = run_episode(177, load_recipe(QUICKSTART).config)
    assert (result.outcome, violations_of(result)) == ("finished", [])


def test_a_step_that_a_new_controller_adopts_is_scored_and_the_budget_of_calls_waits_for_nothing() -> (
    None
):
    """The calls of an evaluation that nobody would make were kept back, and the run stalled."""
    result = run_episode(957768310, load_recipe(QUICKSTART).config)
    assert "RewardCallBudgetSpent" in result.error
    assert violations_of(result) == []


def test_a_slow_step_after_the_verdict_on_a_lost_machine_is_no_idle_engine() -> None:
    """Its updates take 22 s, after 20 s in which the first sync waited for the lost engine."""
    result = run_episode(68688808, load_recipe(QUICKSTART).config, profile="all")
    assert (result.outcome, violations_of(result)) == ("finished", [])


def test_no_trainer_starts_on_a_machine_that_is_cut_off() -> None:
    """It answered its controller from there, and no engine ever reached its ranks."""
    result = run_episode(957769006, load_recipe(QUICKSTART).config)
    assert (result.outcome, violations_of(result)) == ("finished", [])


def test_a_step_that_is_trained_again_has_the_size_it_had_before_a_later_one_was_refused() -> None:
    result = run_episode(957760643, load_recipe(QUICKSTART).config)
    assert (result.outcome, violations_of(result)) == ("finished", [])
