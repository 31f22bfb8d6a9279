from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.telemetry.time_accounting import (
    GeneratorTime,
    TimeAccount,
    TrainerTime,
    Verdict,
    added,
    fractions,
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
    shares = account.fractions()
    assert all(share > 0 for share in shares.values())
    assert sum(shares.values()) == (pytest.approx(1) if clock.now_s > 100 else 0)


@given(st.lists(moves))
def test_laps_sum_to_the_whole(plans: list[list[tuple[TrainerTime, float]]]) -> None:
    clock = Clock()
    account = TimeAccount(clock)
    laps = list[dict[str, float]]()
    for plan in plans:
        spent(account, clock, plan)
        laps.append(account.lap())
    assert {k: v for k, v in added(laps).items() if v} == (
        {k: v for k, v in account.seconds().items() if v} if plans else {}
    )


def test_a_block_gives_the_time_back_to_what_it_interrupted() -> None:
    clock = Clock()
    account = TimeAccount(clock, TrainerTime.COMPUTE)
    with pytest.raises(ValueError, match="x"), account.spending(TrainerTime.CHECKPOINT):  # noqa: PT012
        clock.now_s += 2
        raise ValueError("x")
    clock.now_s += 1
    assert account.seconds() == {"compute": 1, "checkpoint": 2}
    assert account.category == TrainerTime.COMPUTE


def test_a_fleet_is_the_sum_of_its_engines() -> None:
    assert added([{"compute": 1.0}, {"compute": 2.0, "sync": 1.0}]) == {"compute": 3.0, "sync": 1.0}
    assert fractions({"compute": 3.0, "sync": 1.0, "other": 0.0}) == {"compute": 0.75, "sync": 0.25}


T, G = TrainerTime, GeneratorTime


@pytest.mark.parametrize(
    ("trainer", "generators", "reward_s", "says"),
    [
        ({T.COMPUTE: 4, T.WAITING_GROUPS: 6}, {G.COMPUTE: 10}, 0.0, Verdict.GENERATORS),
        ({T.COMPUTE: 4, T.WAITING_GROUPS: 6}, {G.COMPUTE: 10}, 9.0, Verdict.REWARD),
        ({T.COMPUTE: 10}, {G.COMPUTE: 5, G.WAITING_GATE: 5}, 9.0, Verdict.TRAINER),
        ({T.COMPUTE: 5, T.WAITING_WEIGHTS: 5}, {G.COMPUTE: 8, G.SYNC: 2}, 0.0, Verdict.SYNC),
        ({T.COMPUTE: 9, T.WAITING_WEIGHTS: 1}, {G.COMPUTE: 5, G.SYNC: 5}, 0.0, Verdict.SYNC),
        ({T.COMPUTE: 95, T.WAITING_GROUPS: 5}, {G.COMPUTE: 9, G.WAITING_GATE: 1}, 0.0, Verdict.BALANCED),
        ({}, {}, 0.0, Verdict.BALANCED),
    ],
)  # fmt: skip
def test_the_verdict_names_the_cause_of_the_longest_waiting(
    trainer: dict[str, float], generators: dict[str, float], reward_s: float, says: Verdict
) -> None:
    assert verdict(trainer, generators, generate_s=1.0, reward_s=reward_s) is says


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
