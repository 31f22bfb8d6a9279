"""The two ways onto a cluster: Ray's own ``job submit``, and ``offbeat submit``."""

import json
import re
import shlex
import shutil
import sys
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from job_cluster import RAY, ROOT, Cluster, free_ports, give_token, until

from offbeat.messages.versions import read_minor

_MINOR = read_minor(version("ray"))
TAKES_JOBS_WITHOUT_TOKEN = _MINOR is not None and _MINOR < (2, 60)
pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


def summary_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text())


def jobs(cluster: Cluster) -> list[str]:
    with urllib.request.urlopen(f"{cluster.address}/api/jobs/", timeout=10) as reply:  # noqa: S310
        return [job["submission_id"] for job in json.load(reply)]


def said(text: str, word: str) -> str:
    """What stands behind a word at the start of a line."""
    match = re.search(rf"^  {word} +(.+)$", text, re.MULTILINE)
    assert match, text
    return match[1]


def as_ray(command: str) -> list[str]:
    """A command that was printed for a person, with the ``ray`` of this environment."""
    first, *rest = shlex.split(command)
    assert first == "ray"
    return [RAY, *rest]


def test_plain_ray_submits_a_run_that_succeeds(cluster: Cluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = cluster.run(
        *(RAY, "job", "submit", "--address", cluster.address),
        *("--working-dir", str(cluster.project), "--", sys.executable, "-m", "offbeat", "train"),
        *("recipes/tiny.yaml", "steps=5", "--run-dir", str(run_dir)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "succeeded" in done.stdout + done.stderr
    assert summary_of(run_dir)["outcome"] == "finished"
    assert summary_of(run_dir)["steps"] == 5


@pytest.mark.long
def test_submitting_twice_runs_once_and_says_how_to_follow(
    cluster: Cluster, tmp_path: Path
) -> None:
    overrides = ("steps=5", f"run_dir={tmp_path / '{name}'}")
    first, second = cluster.submit(*overrides), cluster.submit(*overrides)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    name = first.stdout.split()[0]
    assert first.stdout.startswith(f"{name} submitted to {cluster.address}\n")
    assert second.stdout.startswith(f"{name} was submitted before and is ")
    assert first.stdout.splitlines()[1:] == second.stdout.splitlines()[1:]
    assert jobs(cluster).count(name) == 1
    followed = cluster.run(*as_ray(said(first.stdout, "follow")))
    assert followed.returncode == 0
    assert "5 in " in followed.stdout, "the summary is in the log that is followed"
    run_dir = Path(said(first.stdout, "results"))
    assert summary_of(run_dir)["outcome"] == "finished"
    assert [path.name for path in tmp_path.iterdir()] == [run_dir.name]
    trained = (run_dir / "logs" / "trained-rank0.jsonl").read_text().splitlines()
    assert len(trained) == 5


AGENT_RECIPE = f"""\
name: agent
steps: 2
groups_per_step: 2
samples_per_group: 2
model: {{path: {ROOT / "models" / "tiny-addition"}}}
environment: {{name: agent, target: "mine.agent:run", reward_workers: 2}}
data: {{path: ../mine/tasks.jsonl}}
generator: {{threads: 1, cpus: 0, sampling: {{max_new_tokens: 4}}}}
trainer: {{threads: 1, cpus: 0}}
wandb: {{mode: disabled}}
"""
AGENT = """\
import asyncio, json, urllib.request
from pathlib import Path

from mine.words import GREETING


def ask(client):
    body = {"model": client.model, "messages": [{"role": "user", "content": GREETING}]}
    request = urllib.request.Request(
        f"{client.base_url}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {client.api_key}", "Content-Type": "application/json"},
    )
    urllib.request.urlopen(request).read()


async def run(task, client):
    await asyncio.to_thread(ask, client)
    return float(Path(__file__).with_name("reward.txt").read_text())
"""


@pytest.mark.long
def test_the_files_of_an_agent_travel_with_its_recipe(cluster: Cluster, tmp_path: Path) -> None:
    mine = cluster.project / "mine"
    mine.mkdir()
    (cluster.project / "recipes" / "agent.yaml").write_text(AGENT_RECIPE)
    (mine / "tasks.jsonl").write_text('{"question": "how many"}\n' * 4)
    (mine / "agent.py").write_text(AGENT)
    (mine / "words.py").write_text('GREETING = "hello"\n')
    (mine / "reward.txt").write_text("0.5")
    submitted = cluster.submit(f"run_dir={tmp_path / '{name}'}", recipe="recipes/agent.yaml")
    assert submitted.returncode == 0, submitted.stderr
    shutil.rmtree(mine)  # what runs now is the copy
    run_dir = Path(said(submitted.stdout, "results"))
    until((run_dir / "summary.json").exists, within_s=360, what="the end of the run")
    assert summary_of(run_dir)["outcome"] == "finished"
    assert summary_of(run_dir)["reward_last"] == 0.5


@pytest.mark.long
def test_a_stopped_job_ends_in_order_before_ray_kills_it_and_is_resumed(
    cluster: Cluster, tmp_path: Path
) -> None:
    submitted = cluster.submit(f"run_dir={tmp_path / '{name}'}")
    run_dir = Path(said(submitted.stdout, "results"))
    metrics = run_dir / "metrics.jsonl"
    until(
        lambda: metrics.exists() and metrics.stat().st_size > 0,
        within_s=180,
        what="the first steps of the job",
    )
    asked_at = time.monotonic()
    stopped = cluster.run(*as_ray(said(submitted.stdout, "stop")))
    assert "was stopped" in stopped.stdout + stopped.stderr
    assert time.monotonic() - asked_at < 15, "several times what it takes on a busy machine"
    summary = summary_of(run_dir)
    assert summary["outcome"] == "aborted"
    assert "SIGTERM" in summary["error"]
    assert summary["steps"] >= 1
    until(lambda: not cluster.actors(), within_s=60, what="the end of all actors")
    again = cluster.submit(f"run_dir={tmp_path / '{name}'}")
    assert again.returncode == 1, "a script sees that the job has not succeeded"
    program, *resume = shlex.split(said(again.stdout, "resume"))
    assert program == "offbeat"
    steps = summary["steps"] + 2
    resumed = cluster.run(sys.executable, "-m", "offbeat", *resume, f"steps={steps}")
    assert resumed.returncode == 0, resumed.stderr
    until(
        lambda: (run_dir / "summary.json").exists() and summary_of(run_dir)["steps"] == steps,
        within_s=180,
        what="the end of the resumed run",
    )
    assert summary_of(run_dir)["outcome"] == "finished"


def test_an_address_where_nobody_answers_is_one_line_and_exit_code_2(cluster: Cluster) -> None:
    (port,) = free_ports(1)
    refused = cluster.submit("steps=5", address=f"http://127.0.0.1:{port}")
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert len(refused.stderr.splitlines()) == 1, refused.stderr
    assert f"http://127.0.0.1:{port}" in refused.stderr
    assert "--address" in refused.stderr


@pytest.mark.long
def test_a_cluster_without_tokens_takes_no_notice_of_one(cluster: Cluster, tmp_path: Path) -> None:
    home = give_token(tmp_path / "home")
    submitted = cluster.submit("steps=1", f"run_dir={tmp_path / '{name}'}", home=home)
    assert submitted.returncode == 0, submitted.stderr
    assert cluster.run(*as_ray(said(submitted.stdout, "stop"))).returncode == 0


@pytest.mark.long
def test_a_token_in_the_home_directory_is_used(guarded: Cluster, tmp_path: Path) -> None:
    submitted = guarded.submit("steps=5", f"run_dir={tmp_path / '{name}'}")
    assert submitted.returncode == 0, submitted.stderr
    run_dir = Path(said(submitted.stdout, "results"))
    until((run_dir / "summary.json").exists, within_s=180, what="the end of the run")
    assert summary_of(run_dir)["outcome"] == "finished"


@pytest.mark.skipif(TAKES_JOBS_WITHOUT_TOKEN, reason="Ray 2.55 takes a job without a token")
def test_a_cluster_with_tokens_refuses_who_has_none_in_one_line(
    guarded: Cluster, tmp_path: Path
) -> None:
    refused = guarded.submit("steps=5", "seed=7", home=tmp_path)
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1, refused.stderr
    assert ".ray/auth_token" in refused.stderr
