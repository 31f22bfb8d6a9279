"""A policy of the user's own: how it is found, and that its word is checked."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from offbeat.config.sections.sampler import CustomSamplerConfig
from offbeat.controller.events import ReturnKind
from offbeat.controller.ledger import GroupRecord
from offbeat.sampler.build import SamplerNotLoaded, build_sampler
from offbeat.sampler.checked_sampler import CheckedSampler, SamplerBroken
from offbeat.sampler.policy import Admission
from offbeat.testing.samplers import SamplerBench

G, STALENESS = 2, 1
MINE = """
from offbeat.sampler.ready_first import ReadyFirst

class Mine(ReadyFirst):
    def __init__(self, *, groups_per_step, max_staleness, patience=1):
        if patience < 0:
            raise ValueError("patience is negative")
        super().__init__(groups_per_step, max_staleness)

class Wide(Mine):
    max_outstanding_groups = 7

class Narrow(Mine):
    max_outstanding_groups = 1

class Bare:
    def __init__(self, **options): ...
    def admit(self, view): ...
    def select(self, view): ...

class Unbounded:
    def __init__(self, **options): ...
    def admit(self, view): ...
    def may_dispatch(self, view, group): ...
    def select(self, view): ...
    def stale(self, view): ...
    def in_flight_to_cancel(self, view, *, predictive): ...

class Whole(Unbounded):
    max_outstanding_groups = 3

class WithHelpers(Mine):
    selected = ()
    def staleness(self): ...

class Misspelt(Mine):
    def may_dispach(self, view, group): ...

class MisspeltBound(Mine):
    max_outstanding_group = 7

number = 3
"""
_names = count()


@pytest.fixture
def module(tmp_path: Path) -> str:
    """A module of the user's in ``tmp_path``, under a name that no other test imports."""
    name = f"my_samplers_{next(_names)}"
    (tmp_path / f"{name}.py").write_text(MINE)
    return name


def load(target: str, folder: Path, **options: Any) -> Any:
    config = CustomSamplerConfig(
        name="custom", target=target, max_staleness=STALENESS, options=options
    )
    return build_sampler(config, G, folder)


def test_a_class_is_called_with_the_runs_numbers_and_its_options(
    module: str, tmp_path: Path
) -> None:
    sampler = load(f"{module}:Mine", tmp_path, patience=2)
    assert isinstance(sampler, CheckedSampler)
    assert (sampler.max_outstanding_groups, sampler.max_staleness) == (
        G * (STALENESS + 1),
        STALENESS,
    )
    run = SamplerBench(sampler, G)
    for _ in range(3):
        run.round()
    assert run.trainer_version == 3


def test_a_class_bounds_its_outstanding_groups_itself(module: str, tmp_path: Path) -> None:
    assert load(f"{module}:Wide", tmp_path).max_outstanding_groups == 7
    assert load(f"{module}:Whole", tmp_path).max_outstanding_groups == 3


def test_a_class_may_have_public_helpers_of_other_names(module: str, tmp_path: Path) -> None:
    assert load(f"{module}:WithHelpers", tmp_path).max_outstanding_groups == G * (STALENESS + 1)


@pytest.mark.parametrize(
    ("name", "options", "problem", "fix"),
    [
        ("Absent", {}, "has no 'Absent'", "Name it module:Class"),
        ("number", {}, "has no 'number' that can be called", "Name it module:Class"),
        ("Mine", {"patience": -1}, "ValueError: patience is negative", "keyword arguments"),
        ("Mine", {"hurry": 1}, "unexpected keyword argument 'hurry'", "keyword arguments"),
        ("Mine", {"max_staleness": 9}, "has max_staleness, which the run passes", "Remove it"),
        (
            "Bare",
            {},
            "a Bare has no method may_dispatch, stale, in_flight_to_cancel",
            "offbeat.interfaces.Sampler",
        ),
        ("Narrow", {}, "its max_outstanding_groups is 1", "groups_per_step or more"),
        (
            "Unbounded",
            {},
            "an Unbounded has no max_outstanding_groups",
            "(max_staleness + 1) * groups_per_step = 4",
        ),
        (
            "Misspelt",
            {},
            "a Misspelt has a may_dispach, which no run calls",
            "Rename it to may_dispatch",
        ),
        (
            "MisspeltBound",
            {},
            "a MisspeltBound has a max_outstanding_group, which no run calls",
            "Rename it to max_outstanding_groups",
        ),
    ],
)
def test_a_class_that_does_not_do_is_told_with_a_fix(
    module: str, tmp_path: Path, name: str, options: dict[str, Any], problem: str, fix: str
) -> None:
    with pytest.raises(SamplerNotLoaded) as caught:
        load(f"{module}:{name}", tmp_path, **options)
    text = str(caught.value)
    assert text.startswith(f"sampler.target={module}:{name}: ")
    assert problem in text and fix in text


def test_a_module_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    (tmp_path / "my_broken_samplers.py").write_text("import no_such_thing")
    with pytest.raises(SamplerNotLoaded, match="imports no_such_thing, which is not installed"):
        load("my_broken_samplers:Mine", tmp_path)
    with pytest.raises(SamplerNotLoaded, match="no module my_missing_samplers from"):
        load("my_missing_samplers:Mine", tmp_path)
    with pytest.raises(SamplerNotLoaded, match="is not of the form module:name"):
        load("my_missing_samplers", tmp_path)


# --- the guard -----------------------------------------------------------------------------------


class Says:
    """Gives one answer to everything."""

    max_staleness = STALENESS
    max_outstanding_groups = G

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def _say(self, *_: Any, **__: Any) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    admit = may_dispatch = select = stale = in_flight_to_cancel = _say


READY, IN_FLIGHT, WAITING, OLD = (2, 3), 4, 5, 6


def watched(answer: Any) -> SamplerBench:
    """At version 2 with a bound of 1: the two ready groups fill the step; the old one is of version 0."""
    run = SamplerBench(CheckedSampler(Says(answer), "mine:Says", STALENESS, 4), G)
    ledger = run.ledger

    def dispatched(version: int) -> GroupRecord:
        group = ledger.groups[ledger.admit(None)]
        ledger.dispatch(group.prompt_index, "generator-0", version)
        return group

    for step in (1, 2):
        group = dispatched(step - 1)
        run.commit(group)
        ledger.claim([group.prompt_index], step, 1)
        ledger.applied(step, 1)
    groups = [dispatched(2) for _ in range(4)]
    for group in (groups[0], groups[1], dispatched(0)):
        run.commit(group)
    ledger.retry(WAITING, ReturnKind.DATA, "reward_raised")
    return run


@pytest.mark.parametrize("answer", [[], [2], (3, 2), [2, 3]])
def test_a_selection_that_can_be_trained_passes(answer: Any) -> None:
    run = watched(answer)
    assert run.sampler.select(run.view) == list(answer)


@pytest.mark.parametrize(
    ("answer", "allowed"),
    [
        (None, "a list of prompt indices"),
        ({2}, "a list of prompt indices"),
        ([2, 2], "each prompt index once"),
        ([IN_FLIGHT], "prompt indices of groups that are ready"),
        ([WAITING], "prompt indices of groups that are ready"),
        ([0], "prompt indices of groups that are ready"),
        ([2.0], "prompt indices of groups that are ready"),
        ([[2]], "prompt indices of groups that are ready"),
        ([2, 3, OLD], "at most the 2 groups that the step needs"),
        ([2, OLD], "groups of version 1 or later (max_staleness=1)"),
    ],
)
def test_a_selection_that_cannot_be_trained_is_refused(answer: Any, allowed: str) -> None:
    run = watched(answer)
    with pytest.raises(SamplerBroken) as caught:
        run.sampler.select(run.view)
    assert str(caught.value).startswith("mine:Says.select returned ")
    assert f"; allowed: {allowed}" in str(caught.value)


def test_nothing_is_selected_beyond_what_the_step_still_needs() -> None:
    run = watched([3])
    run.ledger.claim([2], 3, 1)
    assert run.sampler.select(run.view) == [3]
    run.ledger.batch_deficits[3] = 1
    with pytest.raises(SamplerBroken, match="the 0 groups that the step needs"):
        run.sampler.select(run.view)


def test_only_groups_in_their_place_are_evicted_or_cancelled() -> None:
    run = watched([OLD])
    assert run.sampler.stale(run.view) == [OLD]
    with pytest.raises(SamplerBroken, match="allowed: prompt indices of groups that are in flight"):
        run.sampler.in_flight_to_cancel(run.view, predictive=True)
    run = watched([IN_FLIGHT])
    assert run.sampler.in_flight_to_cancel(run.view, predictive=True) == [IN_FLIGHT]
    with pytest.raises(SamplerBroken, match="allowed: prompt indices of groups that are ready"):
        run.sampler.stale(run.view)


@pytest.mark.parametrize("admission", [None, Admission(), Admission(3), Admission(9)])
def test_a_prompt_is_admitted_for_a_step_to_come_for_any_step_or_not_at_all(
    admission: Admission | None,
) -> None:
    run = watched(admission)
    assert run.sampler.admit(run.view) == admission


UNKNOWN: Any = "3"


@pytest.mark.parametrize(
    "answer",
    [Admission(2), Admission(0), Admission(-1), Admission(True), Admission(UNKNOWN), 3, -1, True],  # noqa: FBT003 - a bool is an int
)
def test_any_other_admission_is_refused(answer: Any) -> None:
    run = watched(answer)
    with pytest.raises(
        SamplerBroken,
        match=r"allowed: None, Admission\(\) for any step, or Admission\(target_step\) from step 3",
    ):
        run.sampler.admit(run.view)


def test_whether_a_group_may_go_is_yes_or_no() -> None:
    run = watched(answer=True)
    assert run.due() is run.ledger.groups[WAITING]
    run = watched(answer=1)
    with pytest.raises(SamplerBroken, match="may_dispatch returned 1; allowed: True or False"):
        run.due()


@pytest.mark.parametrize("method", ["admit", "select", "stale"])
def test_a_policy_that_raises_is_named(method: str) -> None:
    run = watched(ZeroDivisionError("no groups"))
    with pytest.raises(
        SamplerBroken, match=f"mine:Says.{method} raised ZeroDivisionError: no groups"
    ):
        getattr(run.sampler, method)(run.view)


def test_a_long_answer_is_cut_in_the_message() -> None:
    run = watched(list(range(1000)))
    with pytest.raises(SamplerBroken) as caught:
        run.sampler.select(run.view)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("error", [SystemExit(2), KeyboardInterrupt(), BaseException("own")])
def test_a_policy_that_exits_is_named_and_ends_no_event_loop(error: BaseException) -> None:
    with pytest.raises(SamplerBroken, match=rf"mine:Says.select raised {type(error).__name__}"):
        watched(error).sampler.select(watched(error).view)


def test_a_module_or_class_that_exits_says_why(tmp_path: Path) -> None:
    (tmp_path / "my_exiting_samplers.py").write_text("import sys; sys.exit(4)")
    with pytest.raises(SamplerNotLoaded, match="SystemExit: 4"):
        load("my_exiting_samplers:Mine", tmp_path)
    (tmp_path / "my_exiting_class.py").write_text("def Mine(**_):\n    raise SystemExit(5)")
    with pytest.raises(
        SamplerNotLoaded, match=r"raised my_exiting_class.py:2 in Mine: SystemExit: 5"
    ):
        load("my_exiting_class:Mine", tmp_path)
