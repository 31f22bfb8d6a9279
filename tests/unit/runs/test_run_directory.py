import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, chdir
from pathlib import Path
from typing import Any

import pytest
import yaml
from structlog.testing import capture_logs

from offbeat.config.loader import load_recipe
from offbeat.config.run import RunConfig
from offbeat.config.secrets import REDACTED
from offbeat.config.sections.model import ModelConfig
from offbeat.controller.journal import recover
from offbeat.launch.opened_run import OpenedRun, open_run
from offbeat.runs.directory import (
    CONFIG,
    RETRAINED,
    SUMMARY,
    RunDirUnusable,
    check_code_is_here,
    lock_directory,
    make_run_dir,
    reopen_run_dir,
)
from offbeat.runs.inputs import INPUTS, read_inputs, record_input
from tests.support.recorded_runs import RecordedRun


def reopen(recipe: RunConfig, run_dir: Path, *, changed_code: bool = False) -> Path:
    """Resume a run that goes on."""
    resumed = reopen_run_dir(recipe, run_dir, changed_code=changed_code)
    resumed.accept()
    return resumed.path


def config(run_dir: Path | str, *, name: str = "demo", **changes: object) -> RunConfig:
    """Changes are of sections too: ``model={"path": "n"}``."""
    base = RunConfig(name=name, steps=3, run_dir=str(run_dir), model=ModelConfig(path="m"))
    return RunConfig.model_validate({**base.model_dump(), **changes})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a run that has begun and is over."""
    made = make_run_dir(config("unused"), tmp_path / "run")
    (made / "journal").mkdir()
    (made / "journal" / "events-000001.bin").write_bytes(b"?")
    (made / SUMMARY).write_text("{}")
    return made


def test_the_directory_holds_the_resolved_config(tmp_path: Path) -> None:
    made = make_run_dir(config(tmp_path / "deep" / "{name}"), None)
    assert made == tmp_path / "deep" / "demo"
    assert yaml.safe_load((made / CONFIG).read_text())["steps"] == 3


def test_a_run_keeps_the_tokenizer_of_its_model_and_does_without_where_there_is_none(
    tmp_path: Path,
) -> None:
    (tmp_path / "model").mkdir()
    model = {"path": str(tmp_path / "model")}
    bare = make_run_dir(config("unused", model=model), tmp_path / "bare")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    whole = make_run_dir(config("unused", model=model), tmp_path / "whole")
    assert not (bare / "tokenizer.json").exists()
    assert (whole / "tokenizer.json").read_text() == "{}"


def test_the_same_recipe_again_gets_the_next_free_number(tmp_path: Path) -> None:
    made = [make_run_dir(config(tmp_path / "{name}"), None) for _ in range(3)]
    assert [path.name for path in made] == ["demo", "demo-2", "demo-3"]


def test_a_directory_that_was_asked_for_must_be_free(tmp_path: Path) -> None:
    asked = tmp_path / "mine"
    assert make_run_dir(config("unused"), asked) == asked
    before = (asked / CONFIG).read_bytes()
    with pytest.raises(RunDirUnusable, match=r"it holds another run\. Name another one"):
        make_run_dir(config("unused", name="other"), asked)
    assert (asked / CONFIG).read_bytes() == before


def test_a_directory_without_a_run_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert make_run_dir(config("unused"), tmp_path) == tmp_path
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_runs_that_start_at_once_never_share_a_directory(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as starters:
        made = list(
            starters.map(lambda _: make_run_dir(config(tmp_path / "{name}"), None), range(8))
        )
    assert len(set(made)) == 8


def test_a_place_that_cannot_be_written_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirUnusable, match=r"file/below: Not a directory\. Name another one"):
        make_run_dir(config("unused"), tmp_path / "file" / "below")


def test_a_full_disk_leaves_no_half_written_config(tmp_path: Path) -> None:
    """A limit on the size of files stands for it; a resume would miss what is not there."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(RunDirUnusable, match="File too large"):
            make_run_dir(config("unused"), tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "run" / CONFIG).exists()


def test_a_uri_is_refused_by_name_and_nothing_is_made() -> None:
    with pytest.raises(RunDirUnusable, match=r"run directory s3:/bucket/x: it is a URI"):
        make_run_dir(config("unused"), Path("s3://bucket/x"))
    assert not Path("s3:").exists()


def test_a_file_where_the_directory_should_be_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirUnusable, match=r"file: it is a file\. Name another one with"):
        make_run_dir(config("unused"), tmp_path / "file")


def test_a_recipe_whose_directory_is_a_file_takes_the_next_number(tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("")
    assert make_run_dir(config(tmp_path / "{name}"), None) == tmp_path / "demo-2"


def test_a_relative_directory_lies_below_the_working_directory(tmp_path: Path) -> None:
    made = make_run_dir(config(tmp_path / ".." / tmp_path.name / "x"), None)
    assert made.is_absolute()


def test_braces_that_mean_nothing_stay_as_they_are(tmp_path: Path) -> None:
    assert make_run_dir(config("unused"), tmp_path / "a{b}").name == "a{b}"


# --- going on ------------------------------------------------------------------------------------


def test_a_run_goes_on_with_its_own_config_as_it_stands(run_dir: Path) -> None:
    before = (run_dir / CONFIG).read_bytes()
    again = load_recipe(run_dir / CONFIG, dry_run=True).config
    assert reopen(config("unused"), run_dir) == run_dir
    assert (run_dir / CONFIG).read_bytes() == before
    assert again.seed == config("unused").seed


def test_what_may_change_is_written_down_for_the_next_time(run_dir: Path) -> None:
    reopen(config("unused", steps=40), run_dir)
    assert yaml.safe_load((run_dir / CONFIG).read_text())["steps"] == 40
    assert not [path for path in run_dir.iterdir() if path.name.startswith(".")]


def test_a_resume_that_does_not_start_leaves_the_recipe_as_it_was(run_dir: Path) -> None:
    before = [(run_dir / name).read_bytes() for name in (CONFIG, INPUTS)]
    run = OpenedRun("demo", run_dir, {}, reopen_run_dir(config("unused", steps=40), run_dir))
    for phase in ("starting", "failed"):
        run.has_begun(phase)
        assert [(run_dir / name).read_bytes() for name in (CONFIG, INPUTS)] == before
    run.has_begun("running")
    assert yaml.safe_load((run_dir / CONFIG).read_text())["steps"] == 40


def test_what_a_resumed_run_records_before_it_is_accepted_stays(run_dir: Path) -> None:
    resumed = reopen_run_dir(config("unused"), run_dir)
    record_input(run_dir, "data.path", "digest")
    resumed.accept()
    assert read_inputs(run_dir)["data.path"] == "digest"


def test_a_run_that_goes_on_has_no_summary(run_dir: Path) -> None:
    """What a former incarnation told of its end would be taken for this one's."""
    reopen(config("unused"), run_dir)
    assert not (run_dir / SUMMARY).exists()


@pytest.mark.parametrize(("steps", "refused"), [(2, True), (3, True), (4, False)])
def test_a_finished_run_goes_on_only_for_more_steps(
    run_dir: Path, steps: int, refused: bool
) -> None:
    (run_dir / SUMMARY).write_text('{"outcome": "finished", "steps": 3}')
    if refused:
        with pytest.raises(RunDirUnusable, match=r"finished step 3.*steps=6"):
            reopen(config("unused", steps=steps), run_dir)
    else:
        reopen(config("unused", steps=steps), run_dir)
    assert (run_dir / SUMMARY).exists() is refused


@pytest.mark.plugins
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seed": 5}, "seed is 5, the run has 0"),
        ({"model": {"path": "n"}}, "model.path is 'n', the run has 'm'"),
        (
            {"sampler": {"name": "in_order"}},
            "sampler.name is 'in_order', the run has 'ready_first'",
        ),
        ({"data": {"shuffle": False}}, "data.shuffle is False, the run has True"),
        (
            {"environment": {"options": {"digits": 2}}},
            "environment.options.digits is 2, the run has None",
        ),
        (
            {"algorithm": {"loss": {"teacher": "t"}}},
            "algorithm.loss.teacher is 't', the run has None",
        ),
        (
            {"trainer": {"backend": "torch", "lora": {"rank": 4}}},
            (
                "trainer.lora.rank is 4, the run has None; "
                "trainer.lora.alpha is 32.0, the run has None; "
                "trainer.lora.target_modules is [], the run has None"
            ),
        ),
        (
            {"trainer": {"backend": "torch", "freeze": ["lm_head.*"]}},
            "trainer.freeze is ['lm_head.*'], the run has []",
        ),
        (
            {"trainer": {"backend": "torch", "optimizer": {"rounding": "stochastic"}}},
            "trainer.optimizer.rounding is 'stochastic', the run has 'nearest'",
        ),
    ],
    ids=["seed", "model", "sampler", "data", "options", "teacher", "lora", "freeze", "rounding"],
)
def test_what_the_ledger_is_made_of_must_be_as_it_was(
    run_dir: Path, changes: dict[str, object], told: str
) -> None:
    before = (run_dir / CONFIG).read_bytes()
    with pytest.raises(RunDirUnusable) as refused:
        reopen(config("unused", name="demo", **changes), run_dir)
    assert refused.value.problem == told
    assert "offbeat train --resume RUN without settings does" in refused.value.fix
    assert (run_dir / CONFIG).read_bytes() == before
    assert (run_dir / SUMMARY).exists()


def test_a_resumed_run_may_have_more_epochs_but_not_fewer(tmp_path: Path) -> None:
    def epochs(count: int | None) -> RunConfig:
        return config("unused", data={"path": None, "epochs": count})

    made = make_run_dir(epochs(2), tmp_path / "run")
    (made / "journal").mkdir()
    (made / "journal" / "events-000001.bin").write_bytes(b"?")
    with pytest.raises(RunDirUnusable, match=r"data\.epochs is 1, the run has 2"):
        reopen(epochs(1), made)
    for more in (3, None):
        reopen(epochs(more), made)
    with pytest.raises(RunDirUnusable, match=r"data\.epochs is 9, the run has None"):
        reopen(epochs(9), made)


def test_a_run_that_rounded_at_random_may_round_to_the_nearest_and_every_change_is_said(
    tmp_path: Path,
) -> None:
    def rounded(how: str, **trainer: object) -> RunConfig:
        sections = {"backend": "torch", "optimizer": {"rounding": how}} | trainer
        return config("unused", model={"path": "m", "dtype": "bfloat16"}, trainer=sections)

    made = make_run_dir(rounded("stochastic"), tmp_path / "run")
    resumed, said = reopen_run_dir(rounded("nearest", data_parallel=2), made), list[str]()
    with capture_logs() as told:
        OpenedRun("demo", made, {}, resumed).tell_changes(said.append)
    assert {line["event"] for line in told} == {"run.changed"}
    assert [line["what"] for line in told] == said
    assert "trainer.data_parallel is 2 from now on, it was 1" in said
    assert "'nearest', the run has 'stochastic'" in said[-1]
    resumed.accept()
    assert not reopen_run_dir(rounded("nearest", data_parallel=2), made).notices
    with pytest.raises(RunDirUnusable, match="rounding is 'stochastic', the run has 'nearest'"):
        reopen_run_dir(rounded("stochastic"), made)


def test_a_resume_says_at_its_start_which_steps_it_trains_again(tmp_path: Path) -> None:
    made = make_run_dir(config("unused"), tmp_path / "run")
    recorded = RecordedRun(made)
    recorded.ledger.released(0, "d0")
    recorded.train(recorded.ready(2))
    recorded.close()
    said = list[str]()
    with ExitStack() as ours:
        opened = open_run(config("unused"), None, made, ours, {}, changed_code=False)
        opened.tell_changes(said.append)
    assert len(said) == 1
    assert "no checkpoint of version 1" in said[0]
    assert "the initial model" in said[0]


def test_a_resume_with_fewer_steps_than_were_trained_says_so(tmp_path: Path) -> None:
    made = make_run_dir(config("unused", steps=9), tmp_path / "run")
    recorded = RecordedRun(made)
    recorded.ledger.released(0, "d0")
    for _ in range(2):
        recorded.train(recorded.ready(2))
    recorded.close()
    said = list[str]()
    with ExitStack() as ours:
        opened = open_run(config("unused", steps=1), None, made, ours, {}, changed_code=False)
        opened.tell_changes(said.append)
    assert "no checkpoint of version 2" in said[-1]
    assert said[-1].endswith("steps=1 is less than the 2 steps that were trained")


def test_a_resume_that_has_all_its_steps_says_so(tmp_path: Path) -> None:
    made = make_run_dir(config("unused"), tmp_path / "run")
    recorded = RecordedRun(made)
    recorded.ledger.released(0, "d0")
    recorded.train(recorded.ready(2))
    recorded.close()
    (made / "checkpoints").mkdir()
    (made / "checkpoints" / "LATEST").write_text("state_1")
    said = list[str]()
    with ExitStack() as ours:
        opened = open_run(config("unused", steps=1), None, made, ours, {}, changed_code=False)
        opened.tell_changes(said.append)
    assert (
        said[-1]
        == "step 1 is already trained, but steps=1: nothing is left to train, the model is written"
    )


def test_a_resume_elsewhere_names_the_directory_in_which_the_run_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    for folder in (home, other):
        folder.mkdir()
    (home / "elsewhere_reward.py").write_text("def score(row, response): return 1.0\n")
    monkeypatch.chdir(home)
    recipe = config(
        "unused",
        environment={"name": "function", "target": "elsewhere_reward:score"},
        data={"path": "rows.jsonl"},
    )
    made = make_run_dir(recipe, tmp_path / "run")
    check_code_is_here(recipe, made, home)
    with pytest.raises(RunDirUnusable) as refused:
        check_code_is_here(recipe, made, other)
    missing = "environment.target=elsewhere_reward:score"
    assert refused.value.problem == f"no module is found from {other} for {missing}"
    assert refused.value.fix == f"Resume from {home}, where the run was started"
    home.rename(tmp_path / "gone")
    with pytest.raises(RunDirUnusable, match="Resume from the directory that holds the code"):
        check_code_is_here(recipe, made, other)


def test_fewer_steps_than_the_newest_checkpoint_has_are_refused(run_dir: Path) -> None:
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints" / "LATEST").write_text("state_140")
    with pytest.raises(RunDirUnusable, match="checkpoint has step 140, and steps=60") as refused:
        reopen(config("unused", steps=60), run_dir)
    assert refused.value.fix.endswith(f"offbeat train --resume {run_dir} steps=280")
    assert refused.value.in_python().endswith(f"offbeat.resume({str(run_dir)!r}, steps=280)")
    assert (run_dir / SUMMARY).exists(), "nothing has changed"
    assert reopen(config("unused", steps=140), run_dir) == run_dir, "it exports that model"


MIX: dict[str, Any] = {"small": {"weight": 1}, "large": {"weight": 3}}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"large": {"weight": 2}}, "environments.large.weight is 2, the run has 3"),
        (
            {"small": {"environment": {"options": {"low": 5}}}},
            "environments.small.environment.options.low is 5, the run has None",
        ),
        (
            {"small": {"data": {"epochs": 2}}},
            "environments.small.data.epochs is 2, the run has None",
        ),
        ({"new": {}}, "environments.new.weight is 1, the run has None"),
    ],
)
def test_what_decides_which_environment_a_prompt_is_of_must_be_as_it_was(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    made = make_run_dir(config("unused", environments=MIX), tmp_path / "run")
    with pytest.raises(RunDirUnusable) as refused:
        reopen(config("unused", environments=MIX | changes), made)
    assert told in refused.value.problem
    workers = {
        "small": {"environment": {"workers": 2, "reward_deadline_s": 5}},
        "large": MIX["large"],
    }
    assert reopen(config("unused", environments=workers), made) == made


@pytest.mark.plugins
def test_another_trainer_backend_is_refused_with_the_way_to_begin_with_its_weights(
    run_dir: Path,
) -> None:
    with pytest.raises(
        RunDirUnusable, match=r"trainer\.backend is 'megatron', the run has 'torch'"
    ) as refused:
        reopen(config("unused", trainer={"backend": "megatron"}), run_dir)
    checkpoints = run_dir / "checkpoints"
    assert refused.value.fix.endswith(
        "or start a new run with its weights: "
        f"model.weights={checkpoints / 'state_N'}, or model.path={checkpoints / 'step_N'} of an export"
    )
    with pytest.raises(RunDirUnusable) as refused:
        reopen(config("unused", trainer={"backend": "stub"}), run_dir)
    assert refused.value.fix.endswith("or start a new run"), "a stub has no weights"


def test_every_difference_is_told_at_once(run_dir: Path) -> None:
    with pytest.raises(RunDirUnusable, match=r"seed is 5, .*; groups_per_step is 2, "):
        reopen(config("unused", seed=5, groups_per_step=2), run_dir)


def test_a_directory_of_retrained_steps_is_not_resumed(run_dir: Path) -> None:
    (run_dir / RETRAINED).write_text("{}")
    with pytest.raises(RunDirUnusable, match=r"offbeat retrain wrote it.* Resume that run"):
        reopen(config("unused"), run_dir)


def test_a_directory_without_a_run_cannot_be_gone_on_with(run_dir: Path) -> None:
    (run_dir / CONFIG).unlink()
    with pytest.raises(RunDirUnusable, match="it has no run to resume"):
        reopen(config("unused"), run_dir)


def test_a_run_that_was_ended_before_its_first_record_begins(tmp_path: Path) -> None:
    """Else its directory would be a dead end: neither free nor one to go on with."""
    made = make_run_dir(config("unused"), tmp_path / "run")
    (made / "logs").mkdir()
    (made / SUMMARY).write_text("{}")
    assert reopen(config("unused"), made) == made
    assert recover(made / "journal").run_id == ""
    (made / "journal" / "events-000001.bin").write_bytes(b"")
    (made / "metrics.jsonl").write_bytes(b"")
    assert reopen(config("unused"), made) == made


def test_a_secret_that_was_left_out_of_the_config_has_to_be_given_again(run_dir: Path) -> None:
    unknown = config("unused", environment={"options": {"api_key": REDACTED}})
    with pytest.raises(
        RunDirUnusable, match=r"environment\.options\.api_key is not known\. Give it"
    ):
        reopen(unknown, run_dir)


def test_a_damaged_config_is_named_with_the_reason(run_dir: Path) -> None:
    (run_dir / CONFIG).write_text("steps: [")
    with pytest.raises(RunDirUnusable, match="Make it readable and writable"):
        reopen(config("unused"), run_dir)


def test_a_run_directory_is_held_by_one_driver_at_a_time(run_dir: Path) -> None:
    with (
        lock_directory(run_dir),
        pytest.raises(RunDirUnusable, match="its run is alive") as refused,
        lock_directory(run_dir),
    ):
        pytest.fail("two hold it")
    assert refused.value.fix == f"End it first: offbeat control {run_dir} stop"
    with lock_directory(run_dir):
        pass


def test_a_directory_that_is_not_there_cannot_be_held(tmp_path: Path) -> None:
    with (
        pytest.raises(RunDirUnusable, match="it has no run to resume"),
        lock_directory(tmp_path / "no"),
    ):
        pytest.fail("held")


@pytest.mark.parametrize("done", ["metrics.jsonl", "rollouts/0.parquet", "checkpoints/state_9"])
@pytest.mark.parametrize("lost", ["empty", "gone"])
def test_a_run_that_lost_its_journal_is_not_begun_again_from_nothing(
    run_dir: Path, lost: str, done: str
) -> None:
    (run_dir / done).parent.mkdir(exist_ok=True)
    (run_dir / done).write_text("{}")
    (run_dir / "journal" / "events-000001.bin").write_bytes(b"")
    if lost == "gone":
        (run_dir / "journal").rename(run_dir / "elsewhere")
    with pytest.raises(RunDirUnusable, match="its journal is empty or gone"):
        reopen(config("unused"), run_dir)


# --- what a run is made of, by content -------------------------------------------------------------


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A run over a file of prompts and a model directory."""
    (tmp_path / "rows.jsonl").write_text('{"text": "1+1"}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_text("weights")
    made = make_run_dir(over(tmp_path, "rows.jsonl"), tmp_path / "run")
    (made / "journal").mkdir()
    (made / "journal" / "events-000001.bin").write_bytes(b"?")
    return made


def over(tmp_path: Path, rows: str) -> RunConfig:
    data = {"path": str(tmp_path / rows), "shuffle": True, "epochs": None}
    return config("unused", data=data, model={"path": str(tmp_path / "model")})


def test_a_run_goes_on_with_its_prompts_wherever_they_have_moved(
    begun: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").rename(tmp_path / "moved.jsonl")
    assert reopen(over(tmp_path, "moved.jsonl"), begun) == begun


def test_a_run_does_not_go_on_with_other_prompts_of_the_same_name(
    begun: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "2+2"}\n')
    with pytest.raises(RunDirUnusable, match=r"data\.path has different prompts from those"):
        reopen(over(tmp_path, "rows.jsonl"), begun)


def test_a_repaired_generation_config_keeps_no_run_from_going_on_unless_samples_end_otherwise(
    begun: Path, tmp_path: Path
) -> None:
    """Transformers loads a temperature without sampling and refuses to write it: people repair it."""
    file, recipe = tmp_path / "model" / "generation_config.json", over(tmp_path, "rows.jsonl")
    file.write_text('{"temperature": 0.6}')
    reopen(recipe, begun)
    file.write_text('{"temperature": 0.6, "do_sample": true}')
    reopen(recipe, begun)
    file.write_text('{"eos_token_id": [1, 2]}')
    with pytest.raises(
        RunDirUnusable, match=r"model\.path has a different config, tokenizer or code"
    ):
        reopen(recipe, begun)


def test_a_run_does_not_go_on_with_another_tokenizer_of_the_same_name(
    begun: Path, tmp_path: Path
) -> None:
    (tmp_path / "model" / "model.safetensors").write_text("what the trainer has to verify")
    reopen(over(tmp_path, "rows.jsonl"), begun)
    (tmp_path / "model" / "tokenizer.json").write_text('{"version": "2"}')
    with pytest.raises(
        RunDirUnusable, match=r"model\.path has a different config, tokenizer or code"
    ):
        reopen(over(tmp_path, "rows.jsonl"), begun)


def test_a_run_that_recorded_no_inputs_is_held_to_their_names(begun: Path, tmp_path: Path) -> None:
    (begun / "inputs.json").unlink()
    (tmp_path / "moved.jsonl").write_bytes((tmp_path / "rows.jsonl").read_bytes())
    with pytest.raises(RunDirUnusable, match=r"data\.path is .*moved\.jsonl"):
        reopen(over(tmp_path, "moved.jsonl"), begun)


def test_prompts_that_cannot_be_read_for_a_while_keep_their_digest(
    begun: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").rename(tmp_path / "unmounted.jsonl")
    reopen(over(tmp_path, "rows.jsonl"), begun)
    (tmp_path / "rows.jsonl").write_text('{"text": "2+2"}\n')
    with pytest.raises(RunDirUnusable, match=r"data\.path has different prompts from those"):
        reopen(over(tmp_path, "rows.jsonl"), begun)


def test_held_out_prompts_may_be_others_by_another_name_alone(tmp_path: Path) -> None:
    def scored_on(name: str) -> RunConfig:
        return config("unused", eval={"interval": 1, "path": str(tmp_path / name)})

    for name in ("held", "new"):
        (tmp_path / name).write_text(f'{{"prompt": "{name}"}}\n')
    made = make_run_dir(scored_on("held"), tmp_path / "run")
    (tmp_path / "held").write_text('{"prompt": "other"}\n')
    with pytest.raises(
        RunDirUnusable, match=r"eval\.path has different prompts under the same name"
    ):
        reopen(scored_on("held"), made)
    assert reopen(scored_on("new"), made) == made


REWARD = "from mine_helpers.parse import parsed\n\ndef reward(prompt, response):\n    return 1.0\n"


@pytest.fixture
def coded(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Two folders with the same code of the user's; the process is in the first."""
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        (folder / "mine_helpers").mkdir(parents=True)
        (folder / "mine_reward.py").write_text(REWARD)
        (folder / "mine_helpers" / "__init__.py").write_text("")
        (folder / "mine_helpers" / "parse.py").write_text("parsed = 1\n")
    with chdir(folders[0]):
        yield folders


def rewarded() -> RunConfig:
    return config("unused", environment={"name": "function", "target": "mine_reward:reward"})


def test_a_run_goes_on_from_another_folder_that_holds_the_same_code(
    coded: tuple[Path, Path], tmp_path: Path
) -> None:
    made = make_run_dir(rewarded(), tmp_path / "run")
    with chdir(coded[1]):
        assert reopen(rewarded(), made) == made


@pytest.mark.parametrize("file", ["mine_reward.py", "mine_helpers/parse.py"])
def test_a_run_does_not_go_on_with_code_of_the_same_name_in_another_folder(
    coded: tuple[Path, Path], tmp_path: Path, file: str
) -> None:
    made = make_run_dir(rewarded(), tmp_path / "run")
    (coded[1] / file).write_text("def reward(prompt, response):\n    return 2.0\n")
    with pytest.raises(RunDirUnusable) as caught, chdir(coded[1]):
        reopen(rewarded(), made)
    assert "environment.target leads to different source code" in str(caught.value)
    assert f"imported from {coded[0]}, but this is {coded[1]}. Resume from there" in str(
        caught.value
    )


def test_code_that_was_changed_on_purpose_is_gone_on_with_when_it_is_said(
    coded: tuple[Path, Path], tmp_path: Path
) -> None:
    made = make_run_dir(rewarded(), tmp_path / "run")
    (coded[0] / "mine_reward.py").write_text("def reward(prompt, response):\n    return 2.0\n")
    with pytest.raises(RunDirUnusable, match="add --changed-code"):
        reopen(rewarded(), made)
    assert reopen(rewarded(), made, changed_code=True) == made
    assert reopen(rewarded(), made) == made, "it is what the run goes on with"


@pytest.mark.parametrize(
    ("key", "algorithm"),
    [
        ("algorithm.loss.target", {"loss": {"name": "custom", "target": "mine_loss:f"}}),
        ("algorithm.advantage", {"advantage": "mine_loss:f"}),
    ],
)
def test_changed_code_of_the_algorithm_is_refused_or_allowed(
    coded: tuple[Path, Path], tmp_path: Path, key: str, algorithm: dict[str, object]
) -> None:
    source = coded[0] / "mine_loss.py"
    source.write_text("def f(tokens, options): ...\n")
    recipe = config("unused", algorithm=algorithm)
    made = make_run_dir(recipe, tmp_path / "run")
    assert key in read_inputs(made)
    source.write_text("def f(tokens, options): return tokens\n")
    with pytest.raises(RunDirUnusable, match=f"{key} leads to different source code"):
        reopen(recipe, made)
    assert reopen(recipe, made, changed_code=True) == made


@pytest.mark.parametrize("hidden", [[REDACTED], [{"key": REDACTED}], {"a": [[REDACTED]]}])
def test_a_secret_in_a_list_is_asked_for_again_too(tmp_path: Path, hidden: object) -> None:
    made = make_run_dir(config("unused"), tmp_path / "run")
    with pytest.raises(RunDirUnusable, match=r"environment\.options\.credentials"):
        reopen(config("unused", environment={"options": {"credentials": hidden}}), made)
