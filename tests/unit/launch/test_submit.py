import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offbeat.config.loader import LoadedRecipe, load_recipe
from offbeat.launch.commands.main import app
from offbeat.launch.submit import (
    CannotPack,
    NoDashboardAddress,
    RayJob,
    check_address,
    client_environment,
    count_packed_bytes,
    plan,
    plan_resume,
    send,
)

RECIPE = "name: demo\nsteps: 2\nmodel: {path: ../models/tiny}\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "demo.yaml").write_text(RECIPE)
    return tmp_path


def load(project: Path, *overrides: str) -> LoadedRecipe:
    return load_recipe(project / "recipes" / "demo.yaml", overrides)


@pytest.mark.plugins
def test_the_entrypoint_names_the_interpreter_the_recipe_and_a_lasting_run_directory(
    project: Path,
) -> None:
    overrides = ["steps=3", "wandb.project=two words"]
    job = plan(load(project, *overrides), overrides, project, "/py/bin/python")
    run_dir = str(Path.cwd() / "runs" / job.submission_id)
    assert shlex.split(job.entrypoint) == [
        *("/py/bin/python", "-m", "offbeat", "train", "recipes/demo.yaml"),
        *overrides,
        *("--run-dir", run_dir),
    ]
    assert job.runtime_env["working_dir"] == str(project)
    assert ".git" in job.runtime_env["excludes"]


@pytest.mark.parametrize(
    "override",
    ["environment.options.api_key=canary", "environment.options.db=https://ada:canary@host"],
)
def test_a_secret_does_not_become_part_of_a_command_that_others_see(
    project: Path, override: str
) -> None:
    with pytest.raises(CannotPack, match=r"looks like a secret") as refused:
        plan(load(project, override), [override], project, "/py")
    assert "canary" not in str(refused.value)


def test_a_path_that_is_not_packed_is_passed_in_full(project: Path) -> None:
    overrides = [
        "environment.name=function",
        "environment.target=rewards:score",
        f"data.path={project / 'prompts.jsonl'}",
        f"eval.path={project.parent / 'held_out.jsonl'}",
        f"model.path={project / 'runs' / 'demo' / 'checkpoints' / 'step_9'}",
        f"algorithm.loss.teacher={project / 'runs' / 'big' / 'checkpoints' / 'step_9'}",
    ]
    passed = shlex.split(plan(load(project, *overrides), [], project, "/py").entrypoint)
    given = [argument for argument in passed if str(project.parent) in argument]
    assert given == [overrides[4], overrides[3], overrides[5]]


def test_a_path_on_the_hub_is_the_same_for_every_machine(project: Path) -> None:
    path = "hf://datasets/owner/name/train.jsonl"
    overrides = ["environment.name=function", "environment.target=a:b", f"data.path={path}"]
    loaded = load(project, *overrides)
    assert loaded.config.data.path == path, "it is relative to no file"
    assert "data.path" not in plan(loaded, [], project, "/py").entrypoint


def test_the_same_configuration_has_the_same_name_and_another_has_another(project: Path) -> None:
    def name(*overrides: str) -> str:
        return plan(load(project, *overrides), overrides, project, "/py").submission_id

    assert name() == name()
    assert name() != name("seed=1")
    assert name().startswith("demo-")


def test_a_recipe_that_would_not_travel_cannot_be_submitted(project: Path) -> None:
    (project / "runs").mkdir()
    (project / "runs" / "demo.yaml").write_text("extends: ../recipes/demo.yaml\n")
    (project / "mine").mkdir()
    (project / "mine" / "demo.yaml").write_text("extends: ../recipes/demo.yaml\n")
    ways = [
        (project / "mine", "recipes/demo.yaml", project / "mine" / "demo.yaml"),  # what it extends
        (project / "mine", "recipes/demo.yaml", project / "recipes" / "demo.yaml"),
        (project, "runs/demo.yaml", project / "runs" / "demo.yaml"),
    ]
    for working_dir, named, recipe in ways:
        with pytest.raises(CannotPack, match=f"the recipe .*{named} does not travel with it"):
            plan(load_recipe(recipe), [], working_dir, "/py")


def test_a_large_directory_cannot_be_packed(project: Path) -> None:
    with (project / "weights.bin").open("wb") as file:
        file.truncate(2**30)  # sparse: it takes no room
    with pytest.raises(CannotPack, match="it contains 1 GiB, but at most 200 MiB are packed"):
        plan(load(project), [], project, "/py")


def test_what_is_not_packed_is_not_counted(project: Path) -> None:
    before = count_packed_bytes(project)
    for name in (".git/objects", ".venv/lib", ".venv-trl", "a/__pycache__", "runs"):
        folder = project / name
        folder.mkdir(parents=True)
        (folder / "file").write_text("x" * 1000)
    assert count_packed_bytes(project) == before == len(RECIPE)


@dataclass
class FakeJob:
    submission_id: str
    status: str = "RUNNING"


@dataclass
class FakeClient:
    jobs: list[FakeJob] = field(default_factory=list[FakeJob])

    def list_jobs(self) -> list[FakeJob]:
        return self.jobs

    def submit_job(
        self, *, entrypoint: str, submission_id: str, runtime_env: dict[str, Any]
    ) -> str:
        self.jobs.append(FakeJob(submission_id))
        return submission_id


def test_a_job_is_submitted_once_and_followed_after() -> None:
    client, said = FakeClient(), list[str]()
    job = RayJob("demo-1", "python -m offbeat", "/p", "/runs/demo")
    for _ in range(2):
        assert send(job, client, "http://ray:8265", said.append) == 0
    assert [known.submission_id for known in client.jobs] == ["demo-1"]
    assert said[0] == "demo-1 submitted to http://ray:8265"
    assert "  stop    ray job stop demo-1 --address http://ray:8265" in said
    assert any("was submitted before and is RUNNING" in line for line in said)


@pytest.mark.parametrize("status", ["FAILED", "STOPPED"])
def test_a_job_that_ended_early_is_a_failure_and_names_the_command_that_resumes_its_run(
    project: Path, status: str
) -> None:
    job, said = plan(load(project), [], project, "/cluster/bin/python"), list[str]()
    client = FakeClient([FakeJob(job.submission_id, status)])
    assert send(job, client, "http://ray:8265", said.append) == 1
    assert len(client.jobs) == 1
    assert said[0] == (
        f"{job.submission_id} was submitted before and is {status}; resume its run, or change name= "
        "to start over"
    )
    assert said[1] == (
        f"  resume  offbeat submit --resume {job.run_dir} --python /cluster/bin/python "
        "--address http://ray:8265"
    )


def test_a_resume_is_another_job_each_time_in_the_directory_of_the_run(project: Path) -> None:
    jobs = [plan_resume(Path("runs/demo-1"), ["steps=9"], project, "/py") for _ in range(2)]
    here = str(Path.cwd() / "runs" / "demo-1")
    command = ["/py", "-m", "offbeat", "train", "--resume", here, "steps=9"]
    assert [shlex.split(each.entrypoint) for each in jobs] == [command] * 2
    assert jobs[0].run_dir == here and jobs[0].working_dir == str(project)
    assert jobs[0].submission_id.startswith("demo-1-resume-")
    assert jobs[0].submission_id != jobs[1].submission_id
    with pytest.raises(CannotPack, match=r"looks like a secret"):
        plan_resume(Path("runs/demo-1"), ["environment.options.api_key=canary"], project, "/py")


def test_a_resume_of_a_job_takes_no_recipe_and_a_submission_needs_one() -> None:
    both = CliRunner().invoke(app, ["submit", "--resume", "runs/a", "recipe.yaml"])
    assert (both.exit_code, "leave recipe.yaml out" in both.stderr) == (2, True)
    neither = CliRunner().invoke(app, ["submit"])
    assert (neither.exit_code, "Name a RECIPE" in neither.stderr) == (2, True)


@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_a_token_of_the_environment_or_of_the_home_directory_is_to_be_sent(
    name: str, tmp_path: Path
) -> None:
    assert client_environment({}, tmp_path) == {}
    assert client_environment({name: "x"}, tmp_path) == {"RAY_AUTH_MODE": "token"}
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    assert client_environment({}, tmp_path) == {"RAY_AUTH_MODE": "token"}


@pytest.mark.parametrize(
    "address",
    [
        "",
        "auto",
        "head",
        "127.0.0.1",
        "localhost:8265",
        "ray://head:10001",
        "http://",
        "http://h:x",
    ],
)
def test_an_address_that_is_no_url_of_a_dashboard_is_refused_with_the_form_of_one(
    address: str,
) -> None:
    with pytest.raises(NoDashboardAddress, match=r"Write it as http://HOST:8265") as refused:
        check_address(address)
    assert repr(address) in str(refused.value)


@pytest.mark.parametrize(
    "address", ["http://head:8265", "https://ray.example.org/cluster", "http://[::1]:8265"]
)
def test_the_url_of_a_dashboard_is_taken(address: str) -> None:
    check_address(address)
