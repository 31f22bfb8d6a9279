"""The call that resumes a run gives again what was given by value, and allows the fix of the user."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from offbeat.config.by_value import give
from offbeat.config.run import RunConfig
from offbeat.launch.run import RunInterrupted, TrainingFailed, make_ended_run
from offbeat.launch.session import (
    RunEnd,
    compose_preview,
    compose_resume_call,
    compose_resume_command,
)
from offbeat.telemetry.summary import GroupCounts, Summary

RUN: Final = Path("runs/mine")


def right(row: Mapping[str, Any], response: str) -> float:
    return float(response == row["answer"])


def short(row: Mapping[str, Any], response: str) -> float:
    return -float(len(response))


class Grader:
    """An object with a state, which no name of the program stands for."""

    def __call__(self, row: Mapping[str, Any], response: str) -> float:
        return 0.0


def recipe(environment: Mapping[str, Any], **more: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"steps": 1, "model": {"path": "nowhere"}, "data": {"path": "rows.jsonl"},
         "environment": environment, **more}
    )  # fmt: skip


def of(target: str) -> RunConfig:
    return recipe({"name": "function", "target": target})


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        (of("graders:right"), ""),
        (of(give(right)), ", reward=right"),
        (of(give(lambda row, response: 0.0)), ", reward=..."),
        (of(give(Grader())), ", reward=..."),
        (of("offbeat.by_value:right-of_another_process"), ", reward=..."),
        (
            recipe({"name": "function", "rewards": {"a": {"target": give(right), "weight": 0.5},
                    "b": {"target": "graders:short"}, "c": {"target": give(short)}}}),
            ", reward={'a': right, 'c': short}",
        ),
        (recipe({"name": "custom", "target": give(Grader)}),
         ", **{'environment.target': Grader}"),
        (recipe({"name": "function", "target": give(right)},
                algorithm={"loss": {"name": "custom", "target": give(short)},
                           "advantage": give(right)}),
         ", reward=right, advantage=right, loss=short"),
    ],
)  # fmt: skip
def test_objects_by_value_are_given_again(config: RunConfig, arguments: str) -> None:
    assert compose_resume_call(RUN, config) == f"offbeat.resume('runs/mine'{arguments})"


@pytest.mark.plugins
def test_an_agent_by_value_is_given_again() -> None:
    config = recipe({"name": "agent", "target": give(right)})
    assert compose_resume_call(RUN, config) == "offbeat.resume('runs/mine', agent=right)"


def test_code_that_raised_may_have_changed() -> None:
    call = "offbeat.resume('runs/mine', reward=right, changed_code=True)"
    assert compose_resume_call(RUN, of(give(right)), failed_in_user_code=True) == call
    command = "offbeat train --resume runs/mine --changed-code"
    assert compose_resume_command(RUN, of("graders:right"), failed_in_user_code=True) == command


def test_a_preview_of_a_run_is_a_call_or_a_command() -> None:
    assert compose_preview(RUN, in_python=True) == "offbeat.open_run('runs/mine').preview()"
    assert compose_preview(RUN, in_python=False) == "offbeat preview runs/mine/config.yaml"


def test_a_grader_of_the_package_is_no_code_that_a_user_changes() -> None:
    arithmetic = RunConfig.model_validate({"steps": 1, "model": {"path": "nowhere"}})
    assert "changed" not in compose_resume_call(RUN, arithmetic, failed_in_user_code=True)


def test_both_errors_of_an_ended_run_name_the_call() -> None:
    call = compose_resume_call(RUN, of(give(right)))
    assert str(TrainingFailed("it failed", "runs/mine", call)).endswith(f"to resume: {call}")
    assert str(RunInterrupted("runs/mine", call)).endswith(f"to resume: {call}")


def ended_at_version_7(run_dir: Path, saved: int) -> RunEnd:
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints" / "LATEST").write_text(f"state_{saved}")
    summary = Summary(
        run_id="r",
        name="n",
        outcome="aborted",
        steps=7,
        trainer_version=7,
        groups=GroupCounts(),
        wall_s=1.0,
    )
    return RunEnd(130, run_dir, summary, go_on="offbeat.resume()")


def test_an_interruption_that_saved_too_little_names_the_steps_and_the_keys(tmp_path: Path) -> None:
    with pytest.raises(RunInterrupted) as found:
        make_ended_run(ended_at_version_7(tmp_path, saved=5))
    text = str(found.value)
    assert text.startswith("no checkpoint of version 7 was written by the end of the run; a resume")
    assert "checkpoint.interval" in text and "supervision.signal_grace_s" in text
    assert "ended cleanly" not in text
    assert str(pickle.loads(pickle.dumps(found.value))) == text  # noqa: S301


def test_an_interruption_that_saved_its_last_step_ended_cleanly(tmp_path: Path) -> None:
    with pytest.raises(RunInterrupted, match=r"^the run ended cleanly; to resume: "):
        make_ended_run(ended_at_version_7(tmp_path, saved=7))
