from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.telemetry.metric_table import METRICS
from offbeat.telemetry.time_accounting import (
    Bottleneck,
    FleetTimeAccount,
    GeneratorTime,
    StepTimes,
    TimeAccount,
    TrainerTime,
    busy_metrics,
    fractions,
    tuning,
    verdict,
)

CATEGORIES = [*TrainerTime]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


durations_s = st.integers(0, 10_000).map(lambda ms: ms / 1024)  # sums are exact
moves = st.lists(st.tuples(st.sampled_from(CATEGORIES), durations_s))


def spent(account: TimeAccount, clock: Clock, plan: Sequence[tuple[TrainerTime, float]]) -> None:
    for category, duration_s in plan:
        account.switch(category)
        clock.now_s += duration_s


@given(moves)
def test_every_moment_belongs_to_one_category(plan: list[tuple[TrainerTime, float]]) -> None:
    clock = Clock()
    account = TimeAccount(clock)
    spent(account, clock, plan)
    for category in CATEGORIES:
        wanted = sum(duration for name, duration in plan if name == category)
        assert account.seconds().get(category, 0.0) == wanted
    assert sum(account.seconds().values()) == clock.now_s - 100.0


@given(moves)
def test_fractions_sum_to_one(plan: list[tuple[TrainerTime, float]]) -> None:
    clock = Clock()
    account = TimeAccount(clock)
    spent(account, clock, plan)
    shares = fractions(account.seconds())
    assert all(share > 0 for share in shares.values())
    assert sum(shares.values()) == (pytest.approx(1) if clock.now_s > 100 else 0)
    assert fractions({"compute": 3.0, "sync": 1.0, "other": 0.0}) == {"compute": 0.75, "sync": 0.25}


@given(
    st.lists(
        st.tuples(st.sampled_from(CATEGORIES), st.sampled_from(CATEGORIES), st.integers(0, 9), durations_s)
    )
)  # fmt: skip
def test_every_moment_of_every_actor_of_a_crowd_belongs_to_one_category(
    plan: list[tuple[TrainerTime, TrainerTime, int, float]],
) -> None:
    clock = Clock()
    crowd, wanted = FleetTimeAccount(clock), dict[str, float]()
    places = [CATEGORIES[0]] * 10
    crowd.add(CATEGORIES[0], 10)
    for before, after, most, duration_s in plan:
        moving = [n for n, place in enumerate(places) if place is before][:most]
        crowd.switch(before, after, len(moving))
        for number in moving:
            places[number] = after
        for place in places:
            wanted[place] = wanted.get(place, 0.0) + duration_s
        clock.now_s += duration_s
    assert {k: v for k, v in crowd.seconds().items() if v} == {k: v for k, v in wanted.items() if v}
    assert sum(crowd.seconds().values()) == 10 * (clock.now_s - 100.0)


def test_a_lap_takes_a_late_report_as_far_as_it_has_room_for_it() -> None:
    laps = StepTimes("compute", "episodes")
    assert laps.take({"compute": 0.0, "episodes": 5.0}) == {"compute": 0.0, "episodes": 5.0}
    assert laps.take({"compute": 4.0, "episodes": 2.0}) == {"compute": 1.0, "episodes": 0.0}
    assert laps.take({"compute": 4.0, "episodes": 6.0}) == {"compute": 3.0, "episodes": 1.0}


def test_the_busy_metrics_are_declared_and_say_what_nobody_accounts_for() -> None:
    metrics = busy_metrics({T.COMPUTE: 3, T.OTHER: 1}, {G.COMPUTE: 1, G.EPISODES: 1})
    assert metrics.keys() <= METRICS.keys()
    assert metrics == {
        "busy/trainer_fraction": 0.75,
        "busy/generator_fraction": 0.5,
        "busy/trainer_unattributed_fraction": 0.25,
        "busy/generator_unattributed_fraction": 0.0,
    }


T, G = TrainerTime, GeneratorTime


@pytest.mark.parametrize(
    ("trainer", "generators", "reward_s", "says"),
    [
        ({T.COMPUTE: 4, T.WAITING_GROUPS: 6}, {G.COMPUTE: 10}, 0.0, Bottleneck.GENERATORS),
        ({T.COMPUTE: 4, T.WAITING_GROUPS: 6}, {G.COMPUTE: 10}, 9.0, Bottleneck.REWARD),
        ({T.COMPUTE: 10}, {G.COMPUTE: 5, G.WAITING_GATE: 5}, 9.0, Bottleneck.TRAINER),
        ({T.COMPUTE: 5, T.WAITING_WEIGHTS: 5}, {G.COMPUTE: 8, G.SYNC: 2}, 0.0, Bottleneck.SYNC),
        ({T.COMPUTE: 9, T.WAITING_WEIGHTS: 1}, {G.COMPUTE: 5, G.SYNC: 5}, 0.0, Bottleneck.SYNC),
        ({T.COMPUTE: 95, T.WAITING_GROUPS: 5}, {G.COMPUTE: 9, G.WAITING_GATE: 1}, 0.0, Bottleneck.BALANCED),
        ({}, {}, 0.0, Bottleneck.BALANCED),
        # Of a quarter and less nobody has to be told.
        ({T.COMPUTE: 68, T.CALLS: 18, T.SYNC: 14}, {G.COMPUTE: 8, G.SYNC: 2}, 0.0, Bottleneck.BALANCED),
        ({T.COMPUTE: 75, T.WAITING_GROUPS: 25}, {G.COMPUTE: 10}, 0.0, Bottleneck.BALANCED),
        # They wait by turns: what both wait is the bound's, the rest is the slower one's.
        ({T.COMPUTE: 5, T.WAITING_GROUPS: 5}, {G.COMPUTE: 4, G.WAITING_GATE: 6}, 0.0, Bottleneck.STALENESS),
        ({T.COMPUTE: 8, T.WAITING_GROUPS: 2}, {G.COMPUTE: 2, G.WAITING_GATE: 8}, 0.0, Bottleneck.TRAINER),
        ({T.COMPUTE: 2, T.WAITING_GROUPS: 8}, {G.COMPUTE: 8, G.WAITING_GATE: 2}, 9.0, Bottleneck.REWARD),
        # Engines are idle while groups are out: the time goes to no measured reward, but not to them.
        ({T.COMPUTE: 4, T.WAITING_GROUPS: 6}, {G.COMPUTE: 1, G.EPISODES: 9}, 0.0, Bottleneck.REWARD),
        # An incident, and what only follows from it.
        ({T.COMPUTE: 4, T.INCIDENT: 6}, {G.COMPUTE: 4, G.WAITING_GATE: 6}, 0.0, Bottleneck.INCIDENT),
        ({T.COMPUTE: 4, T.WAITING_GROUPS: 6}, {G.COMPUTE: 4, G.INCIDENT: 6}, 0.0, Bottleneck.INCIDENT),
        ({T.COMPUTE: 4, T.WAITING_GROUPS: 6}, {G.COMPUTE: 88, G.INCIDENT: 12}, 0.0, Bottleneck.GENERATORS),
        # An operator's pause is nobody's fault.
        ({T.COMPUTE: 4, T.WAITING_GATE: 6}, {G.COMPUTE: 4, G.WAITING_GATE: 6}, 0.0, Bottleneck.BALANCED),
        ({T.COMPUTE: 7, T.SYNC: 3}, {G.COMPUTE: 10}, 0.0, Bottleneck.SYNC),
        ({T.COMPUTE: 10}, {G.COMPUTE: 7, G.WAITING_WEIGHTS: 3}, 0.0, Bottleneck.SYNC),
    ],
)  # fmt: skip
def test_the_verdict_names_the_cause_of_the_longest_waiting(
    trainer: dict[str, float], generators: dict[str, float], reward_s: float, says: Bottleneck
) -> None:
    assert verdict(trainer, generators, generate_s=1.0, reward_s=reward_s) is says


KEPT: dict[str, object] = {
    "sync.mode": "keep", "sync.interval": 2, "sampler.max_staleness": 1, "trainer.threads": 1,
    "trainer.device": "cuda", "trainer.data_parallel": 1, "generator.engines": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("bottleneck", "changed", "says"),
    [
        ("sync", {}, ["another sync.transport"]),
        ("sync", {"sync.mode": "abort_stale"}, ["another sync.transport"]),
        (
            "sync",
            {"sync.mode": "drain", "sampler.max_staleness": 2},
            ["a larger sync.interval", "sync.mode=keep", "another sync.transport"],
        ),
        ("generators", {}, ["more generator.engines", "shorter answers"]),
        ("trainer", {}, ["more trainer.data_parallel", "fewer samples per step"]),
        (
            "trainer",
            {"trainer.device": "cpu"},
            ["more trainer.data_parallel", "more trainer.threads", "fewer samples per step"],
        ),
        ("reward", {"environment.name": "function"}, ["a cheaper reward"]),
        pytest.param(
            "reward",
            {"environment.name": "agent"},
            ["environment.episode_deadline_s if episodes hang", "faster episodes"],
            marks=pytest.mark.plugins,
        ),
        pytest.param(
            "reward",
            {"environment.name": "agent", "environment.episode_deadline_s": 9.0},
            ["a lower environment.episode_deadline_s", "faster episodes"],
            marks=pytest.mark.plugins,
        ),
        ("balanced", {}, []),
        ("of another version", {}, []),
    ],
)
def test_only_changes_that_the_recipe_has_not_are_suggested(
    bottleneck: str, changed: dict[str, object], says: list[str]
) -> None:
    assert tuning(bottleneck, {**KEPT, **changed}) == says


@given(
    st.dictionaries(st.sampled_from([*T]), durations_s),
    st.dictionaries(st.sampled_from([*G]), durations_s),
    st.sampled_from([2.0, 0.25, 1024.0]),
)
def test_the_verdict_does_not_depend_on_how_long_the_step_was(
    trainer: dict[str, float], generators: dict[str, float], scale: float
) -> None:
    def scaled(times: dict[str, float]) -> dict[str, float]:
        return {name: value * scale for name, value in times.items()}

    assert verdict(scaled(trainer), scaled(generators)) == verdict(trainer, generators)
