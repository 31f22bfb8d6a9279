"""Both policies against a model of the run: any order of finishing, failing, training, syncing."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.sampler.in_order import InOrder
from offbeat.sampler.policy import Sampler, View
from offbeat.sampler.ready_first import ReadyFirst

G = 3
MOVES = ["admit", "finish_new", "train", "serve"] * 3 + ["finish_old", "fail", "drop"]


@dataclass
class Group:
    ordinal: int
    stamp: int
    bound_version: int


class Model:
    """A run reduced to what a policy sees; training takes what ``select`` says and nothing else."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.trainer = self.serving = self.drawn = 0
        self.flying, self.ready = dict[int, Group](), dict[int, Group]()
        self.claimed = list[Group]()
        self.trained_staleness = list[int]()
        self.evicted = 0

    def view(self) -> View:
        held = [*self.flying.values(), *self.ready.values()]
        versions, stamped = dict[int, int](), dict[int, int]()
        for group in held:
            versions[group.bound_version] = versions.get(group.bound_version, 0) + 1
            stamped[group.stamp] = stamped.get(group.stamp, 0) + 1
        quota = G - len(self.claimed)
        ready = list(self.ready.values())
        return View(self.trainer, self.serving, quota, 0, versions, stamped, {}, ready)

    def admit(self) -> bool:
        stamp = self.sampler.admit(self.view())
        if stamp is None:
            return False
        self.flying[self.drawn] = Group(self.drawn, stamp, self.serving)
        self.drawn += 1
        return True

    def finish(self, ordinal: int) -> None:
        self.ready[ordinal] = self.flying.pop(ordinal)

    def train(self) -> None:
        for ordinal in self.sampler.select(self.view()):
            self.claimed.append(self.ready.pop(ordinal))
        if len(self.claimed) == G:
            self.trained_staleness += [self.trainer - each.bound_version for each in self.claimed]
            self.claimed = []
            self.trainer += 1
        for ordinal in self.sampler.stale(self.view()):
            del self.ready[ordinal]
            self.evicted += 1

    def move(self, name: str) -> None:
        flying = sorted(self.flying)
        if name == "admit":
            self.admit()
        elif name == "finish_new" and flying:
            self.finish(flying[-1])
        elif name == "finish_old" and flying:
            self.finish(flying[0])
        elif name == "fail" and flying:  # re-dispatched at once, under the serving version
            group = self.flying[flying[0]]
            self.flying[flying[0]] = Group(group.ordinal, group.stamp, self.serving)
        elif name == "drop" and flying:
            del self.flying[flying[-1]]
        elif name == "train":
            self.train()
        elif name == "serve":
            self.serving = self.trainer


def policies(staleness: int) -> list[Sampler]:
    return [ReadyFirst(G, staleness), InOrder(G, staleness, staleness)]


@settings(max_examples=200)
@given(st.integers(0, 3), st.integers(0, 1), st.lists(st.sampled_from(MOVES), min_size=80))
def test_nothing_is_trained_past_the_bound_and_nothing_is_discarded(
    staleness: int, which: int, moves: list[str]
) -> None:
    model = Model(policies(staleness)[which])
    for move in moves:
        model.move(move)
        assert len(model.flying) + len(model.ready) + len(model.claimed) <= model.sampler.reach
    assert all(0 <= each <= staleness for each in model.trained_staleness)
    assert model.evicted == 0


@settings(max_examples=100)
@given(st.integers(0, 3), st.integers(0, 1), st.lists(st.sampled_from(MOVES), max_size=60))
def test_from_anywhere_the_run_goes_on_once_rollouts_end(
    staleness: int, which: int, moves: list[str]
) -> None:
    """No reservation can lock the train pump out: finishing everything always yields a step."""
    model = Model(policies(staleness)[which])
    for move in moves:
        model.move(move)
    for _ in range(3):
        before = model.trainer
        model.serving = model.trainer
        while model.admit():
            pass
        for ordinal in list(model.flying):
            model.finish(ordinal)
        model.train()
        assert model.trainer == before + 1


@pytest.mark.parametrize("staleness", range(4))
@pytest.mark.parametrize("which", [0, 1])
def test_a_fast_generator_uses_the_whole_bound(staleness: int, which: int) -> None:
    model = Model(policies(staleness)[which])
    for _ in range(40):
        while model.admit():
            pass
        for ordinal in list(model.flying):
            model.finish(ordinal)
        model.train()
        model.serving = model.trainer
    assert max(model.trained_staleness) == staleness


def test_ready_first_keeps_a_place_for_the_oldest_in_flight() -> None:
    policy = ReadyFirst(groups_per_step=2, max_staleness=1)
    fresh = [Group(ordinal, -1, 1) for ordinal in (5, 6)]
    view = View(1, 1, 2, 0, {0: 1, 1: 2}, {}, {}, fresh)
    assert policy.select(view) == [5], "the second place belongs to the group of version 0"


def test_in_order_admits_the_nearest_step_that_is_not_full() -> None:
    policy = InOrder(groups_per_step=2, max_staleness=3, max_lookahead=2)
    view = View(0, 0, 2, 0, {}, {1: 2, 2: 1}, {}, [])
    assert policy.admit(view) == 2
    full = View(0, 0, 2, 0, {}, {1: 2, 2: 2, 3: 2}, {}, [])
    assert policy.admit(full) is None, "the look-ahead is two batches"
