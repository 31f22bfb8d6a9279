"""Rules and options of task libraries; the libraries themselves are not needed."""

from pathlib import Path
from typing import Any

import pytest

from offbeat.config.crosschecks import clashes
from offbeat.config.run import RunConfig
from offbeat.environments.factory import BadEnvironment, make_prompts
from offbeat.runs.directory import make_run_dir, reopen_run_dir
from offbeat.runs.inputs import record_input


def run_config(environment: dict[str, Any], **sections: Any) -> RunConfig:
    recipe = {"steps": 2, "model": {"path": "tiny"}, "environment": environment}
    return RunConfig.model_validate(recipe | sections)


def test_prompts_of_reasoning_gym_say_which_item_of_which_seed_they_are() -> None:
    section = {"name": "reasoning_gym", "options": {"task": "chain_sum", "rows": 5}}
    source = make_prompts(run_config(section))
    assert sorted(prompt.data["item"] for i in range(5) if (prompt := source.prompt(i))) == [
        *range(5)
    ]
    assert {prompt.data["seed"] for i in range(9) if (prompt := source.prompt(i))} == {0}


@pytest.mark.parametrize("options", [{}, {"task": "a", "rows": 0}, {"task": "a", "terms": 2}])
def test_options_that_no_task_of_reasoning_gym_takes_are_told(options: dict[str, Any]) -> None:
    with pytest.raises(BadEnvironment, match=r"environment\.options"):
        make_prompts(run_config({"name": "reasoning_gym", "options": options}))


def test_a_task_library_reads_no_file() -> None:
    config = run_config({"name": "reasoning_gym"}, data={"path": "rows.jsonl"})
    (clash,) = clashes(config, dry_run=False)
    assert "data.path is not used: environment.name=reasoning_gym makes its own" in clash.message


def test_the_renderer_of_verifiers_is_a_key_of_the_section() -> None:
    qwen3 = {"renderer": {"name": "qwen3"}}
    assert not [*clashes(run_config({"name": "verifiers", **qwen3}), dry_run=False)]
    config = run_config({"name": "verifiers", "options": qwen3})
    (clash,) = clashes(config, dry_run=False)
    assert "environment.options.renderer={'name': 'qwen3'} is not read" in clash.message
    assert "Write it as environment.renderer" in clash.hint


def test_tasks_that_an_environment_makes_are_compared_by_every_resume(tmp_path: Path) -> None:
    recipe = run_config({"name": "verifiers"})
    made = make_run_dir(recipe, tmp_path / "run")
    record_input(made, "data.path", "digest")
    for _ in range(2):
        resumed = reopen_run_dir(recipe, made)
        assert resumed.inputs["data.path"] == "digest"
        resumed.accept()
