"""Runs that are started from Python: rewards by value, results, resume, threads and a notebook."""

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import nbformat
import pytest
from nbclient import NotebookClient

import offbeat
from offbeat.config.problems import ConfigError
from offbeat.runs.results import NoSuchStep

ROOT: Final = Path(__file__).parents[2]
ROWS: Final = [{"prompt": f"{a}+{b}=", "answer": a + b} for a in range(9) for b in range(9)]
BONUS = 1.0


def reward(row: Mapping[str, Any], response: str) -> float:
    return BONUS * (response == str(row["answer"]))


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": ROOT / "models" / "tiny-addition",
        "prompts": ROWS,
        "reward": reward,
        "run_dir": folder / "run",
        "groups_per_step": 4,
        "samples_per_group": 4,
        "max_new_tokens": 4,
        "wandb": {"mode": "disabled"},
        "steps": 3,
        **more,
    }


def seen_by_reward(sample: Mapping[str, Any]) -> str:
    """The response without its end token."""
    return sample["response"].removesuffix("<eos>")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> offbeat.Run:
    return offbeat.train(quiet=True, **settings(tmp_path_factory.mktemp("python")))


@pytest.fixture(autouse=True)
def _as_a_program_in_the_foreground() -> Iterator[None]:
    """Have Ctrl-C interrupt: a job that a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_run_of_rows_and_a_function_trains_in_this_process(run: offbeat.Run) -> None:
    assert run.summary["outcome"] == "finished"
    assert run.config.runtime.backend == "local"
    assert list(run.metrics()["step"]) == [1, 2, 3]


def test_the_samples_of_a_step_are_rewarded_as_the_function_says(run: offbeat.Run) -> None:
    samples = run.samples(2)
    assert len(samples) == 16
    answers = {row["prompt"]: row for row in ROWS}
    for sample in samples.to_dict("records"):
        assert sample["reward"] == reward(answers[sample["prompt"]], seen_by_reward(sample))
    assert samples.groupby("group")["advantage"].sum().abs().max() < 1e-6
    mean = run.metrics().set_index("step")["train/reward"][2]
    assert samples["reward"].mean() == pytest.approx(mean)
    with pytest.raises(
        NoSuchStep, match="step 4 was not trained: the run has trained steps 1 to 3"
    ):
        run.samples(4)


def test_its_model_loads_and_its_directory_opens_again(run: offbeat.Run) -> None:
    model, tokenizer = run.load()
    assert model.num_parameters() > 0
    assert tokenizer.decode(tokenizer.encode("1+2=", add_special_tokens=False)) == "1+2="
    again = offbeat.open_run(run.directory)
    assert again.samples().equals(run.samples())
    assert len(again.failures()) == len(again.evaluations()) == 0


def test_it_shows_what_its_model_answers_now(run: offbeat.Run) -> None:
    preview = run.preview()
    assert len(preview.prompts) == 16
    assert preview.model == str(run.model_path)


def test_its_recipe_loads_as_the_same_configuration(run: offbeat.Run, tmp_path: Path) -> None:
    run.save_recipe(tmp_path / "mine.yaml")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        run.save_recipe(tmp_path / "mine.yaml")
    run.save_recipe(tmp_path / "mine.yaml", overwrite=True)
    assert offbeat.load_recipe(tmp_path / "mine.yaml").config == run.config


def test_a_resume_needs_the_same_code(run: offbeat.Run) -> None:
    with pytest.raises(offbeat.RunRefused, match="leads to different source code"):
        offbeat.resume(run.directory, reward=lambda row, response: 0.0, steps=4, quiet=True)
    further = offbeat.resume(run.directory, reward=reward, steps=4, quiet=True)
    assert further.summary["steps"] == 4


def test_a_function_that_raises_ends_the_run_with_its_line_and_the_call_after_the_fix(
    tmp_path: Path,
) -> None:
    def typo(row: Mapping[str, Any], response: str) -> float:
        return float(row["anwser"] == response)

    with pytest.raises(offbeat.TrainingFailed, match=r"in typo: KeyError: 'anwser'") as failed:
        offbeat.train(quiet=True, **settings(tmp_path, reward=typo))
    assert "Traceback" in failed.value.run.failures()["traceback"][0]
    call = f"offbeat.resume({str(tmp_path / 'run')!r}, reward=typo, changed_code=True)"
    assert str(failed.value).endswith(call)
    resumed = offbeat.resume(tmp_path / "run", reward=reward, changed_code=True, quiet=True)
    assert resumed.summary["steps"] == 3


def test_a_function_of_the_wrong_form_is_refused_before_the_run(tmp_path: Path) -> None:
    def of_a_batch(completions: list[str]) -> list[float]:
        return [0.0 for _ in completions]

    with pytest.raises(offbeat.RunRefused, match="of_a_batch"):
        offbeat.train(quiet=True, **settings(tmp_path, reward=of_a_batch))
    assert not (tmp_path / "run").exists()


def short(row: Mapping[str, Any], response: str) -> float:
    return len(row["prompt"]) / 100 - len(response) / 100


@pytest.mark.parametrize(
    ("rewards", "weight"),
    [
        ([reward, short], 1.0),
        ({"right": reward, "brief": {"target": short, "weight": 0.5}}, 0.5),
    ],
)
def test_several_functions_are_summed(tmp_path: Path, rewards: object, weight: float) -> None:
    run = offbeat.train(quiet=True, **settings(tmp_path, reward=rewards, steps=1))
    answers = {row["prompt"]: row for row in ROWS}
    for sample in run.samples().to_dict("records"):
        row, response = answers[sample["prompt"]], seen_by_reward(sample)
        total = reward(row, response) + weight * short(row, response)
        assert sample["reward"] == pytest.approx(total)


def test_a_dry_run_needs_neither_model_nor_engine(tmp_path: Path) -> None:
    run = offbeat.train(quiet=True, dry_run=True, **settings(tmp_path, model="nowhere"))
    assert run.summary["outcome"] == "finished"


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_function_by_value_reaches_the_workers_on_ray(tmp_path: Path) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        run = offbeat.train(quiet=True, runtime="ray", **settings(tmp_path, steps=1))
        other.communicate()
    assert other.returncode == 0, "children of the program are not the run's to end"
    assert run.config.runtime.backend == "ray"
    answers = {row["prompt"]: row for row in ROWS}
    for sample in run.samples().to_dict("records"):
        assert sample["reward"] == reward(answers[sample["prompt"]], seen_by_reward(sample))


def test_runs_start_inside_of_an_event_loop_and_in_a_thread(tmp_path: Path) -> None:
    async def main() -> offbeat.Run:
        return offbeat.train(quiet=True, **settings(tmp_path / "loop", steps=1))

    assert asyncio.run(main()).summary["steps"] == 1
    ended = list[offbeat.Run]()

    def in_thread() -> None:
        ended.append(offbeat.train(quiet=True, **settings(tmp_path / "thread", steps=1)))

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert ended[0].summary["steps"] == 1


def test_a_run_in_the_background_is_stopped_and_goes_on(tmp_path: Path) -> None:
    live = offbeat.start(**settings(tmp_path, steps=100_000))
    assert live.is_alive
    with pytest.raises(TimeoutError, match=r"has not ended after 0\.1 s"):
        live.wait(0.1)
    while not len(live.metrics()):
        with contextlib.suppress(TimeoutError):
            live.wait(0.1)
    live.stop()
    stopped = live.wait()
    steps = stopped.summary["steps"]
    assert stopped.summary["outcome"] == "finished" and not live.is_alive
    assert stopped.summary["ended_by"] == "run.stop()"
    assert stopped.model_path.name == f"step_{steps}"
    live.stop()
    assert offbeat.resume(tmp_path / "run", steps=steps + 1, quiet=True).summary["steps"] > steps


def test_functions_of_one_name_are_refused_and_a_method_is_a_reward(tmp_path: Path) -> None:
    class Grader:
        def score(self, row: Mapping[str, Any], response: str) -> float:
            return reward(row, response)

    with pytest.raises(ConfigError, match="several functions are called reward"):
        offbeat.train(quiet=True, **settings(tmp_path, reward=[reward, reward]))
    both = [Grader().score, functools.partial(short)]
    run = offbeat.train(quiet=True, **settings(tmp_path, reward=both, steps=1))
    assert [*run.config.environment.rewards] == ["score", "short"]


def test_a_wait_that_is_interrupted_ends_its_run_in_order(tmp_path: Path) -> None:
    live = offbeat.start(**settings(tmp_path, steps=100_000))
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(offbeat.RunInterrupted):
        live.wait()
    assert live.summary["outcome"] == "aborted" and not live.is_alive
    assert live.summary["ended_by"] == "SIGINT"


LAST_LINE: Final = """
import offbeat

rows = [{{"prompt": "1+1=", "answer": 2}}, {{"prompt": "1+2=", "answer": 3}}]
offbeat.start(
    model={model!r}, prompts=rows, reward=lambda row, text: float(text == str({right})),
    run_dir={run_dir!r}, steps={steps}, groups_per_step=2, samples_per_group=2, max_new_tokens=4,
    wandb={{"mode": "disabled"}},
)
"""


def test_a_program_that_ends_with_start_lives_until_its_run_has_ended(tmp_path: Path) -> None:
    program = _program(tmp_path, steps=3)
    _, said = program.communicate()
    assert program.returncode == 0, said
    assert f"the program has ended, but the run in {tmp_path / 'run'} continues" in said
    assert offbeat.open_run(tmp_path / "run").summary["outcome"] == "finished"


def test_a_program_that_waits_for_a_run_fails_with_it(tmp_path: Path) -> None:
    program = _program(tmp_path, steps=3, right="row['lost']")
    _, said = program.communicate()
    assert "TrainingFailed" in said and "KeyError: 'lost'" in said
    assert program.returncode == 1


def test_ctrl_c_ends_a_run_that_its_program_waits_for(tmp_path: Path) -> None:
    program = _program(tmp_path, steps=100_000)
    assert program.stderr is not None
    line = program.stderr.readline()
    assert "continues" in line
    program.send_signal(signal.SIGINT)
    _, said = program.communicate()
    assert "ended cleanly" in said and "Traceback" not in said
    assert program.returncode == 128 + signal.SIGINT
    assert offbeat.open_run(tmp_path / "run").summary["ended_by"] == "SIGINT"


def _program(folder: Path, steps: int, right: str = "row['answer']") -> subprocess.Popen[str]:
    model, run_dir = str(ROOT / "models" / "tiny-addition"), str(folder / "run")
    script = folder / "program.py"
    script.write_text(LAST_LINE.format(model=model, run_dir=run_dir, steps=steps, right=right))
    return subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_interrupted_run_ends_in_order(tmp_path: Path) -> None:
    def interrupt() -> None:
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            watching.wait(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    watching = threading.Event()
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(offbeat.RunInterrupted, match="ended cleanly") as interrupted:
        offbeat.train(quiet=True, **settings(tmp_path, steps=100_000))
    thread.join()
    assert interrupted.value.run.summary["outcome"] == "aborted"


@pytest.mark.timeout(600)  # it may share two cores with another suite
def test_the_notebook_runs_from_its_first_cell_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").symlink_to(ROOT / "models")
    (tmp_path / "examples").mkdir()
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # offbeat
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    notebook = nbformat.read(ROOT / "examples" / "quickstart.ipynb", 4)
    client = NotebookClient(
        notebook, timeout=550, resources={"metadata": {"path": str(tmp_path / "examples")}}
    )
    client.execute()
    pages = [
        output["data"]["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "text/html" in output.get("data", {})
    ]
    assert any("<progress" in page and "<polyline" in page for page in pages), "the live panel"
    assert any("<iframe" in page for page in pages), "the report"
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())
    )
    assert "the same, predicted" in printed, "the plan"
    learned = offbeat.open_run(tmp_path / "examples" / "runs" / "run").metrics()["train/reward"]
    assert learned.tail(20).mean() > learned.head(20).mean() + 0.2
