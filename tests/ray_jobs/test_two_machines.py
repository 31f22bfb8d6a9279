"""Runs on two machines, of which one does not see what the other has on its disk."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from job_cluster import ROOT, Cluster, give_token, hiding, joined, started

from tests.support.run_records import RunRecords

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
ON_THE_OTHER = "trainer.cpus=4"
"""More than the driver's machine has."""


@dataclass(frozen=True, slots=True)
class Machines:
    """A cluster of two machines, and folders of the first one, where the driver is."""

    cluster: Cluster
    hidden: Path  # the other machine has another folder there
    shared: Path

    def train(
        self, *arguments: str, recipe: str = "recipes/tiny.yaml", home: Path | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """``offbeat train`` on the first machine."""
        command = (sys.executable, "-m", "offbeat", "train", recipe, *arguments)
        joins = ("env", f"RAY_ADDRESS={self.cluster.gcs}")
        return self.cluster.run(*joins, *command, home=home, timeout_s=120)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("machines")
    hidden, shared = folder / "hidden", folder / "shared"
    hidden.mkdir()
    shared.mkdir()
    give_token(folder / "home")
    first = hiding(hidden)
    if first is None:
        pytest.skip("this machine lets nobody have a file system of its own")
    with (
        started(folder, address="127.0.0.2") as cluster,
        joined(cluster, first, cpus=8),
    ):
        yield Machines(cluster, hidden, shared)


def elsewhere(run_dir: Path) -> set[str]:
    """Names of the processes that wrote on another machine."""
    lines = (run_dir / "elsewhere.jsonl").read_text().splitlines()
    return {json.loads(line)["process"] for line in lines}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def summary_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text())


def test_what_a_trainer_of_another_machine_writes_is_in_the_run_directory(
    machines: Machines,
) -> None:
    """And a resumed run goes on from there, on a machine that has none of it."""
    run_dir = machines.hidden / "run"
    short = (ON_THE_OTHER, "checkpoint.interval=2", "environment.workers=6")
    done = machines.train(*short, "steps=5", "--run-dir", str(run_dir))
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary_of(run_dir)["outcome"] == "finished"
    assert names(run_dir / "checkpoints") == {"state_4", "state_5", "LATEST", "step_5"}
    assert "trainer-rank0" in elsewhere(run_dir)
    assert not [name for name in names(run_dir) if name.startswith(".")]
    records = RunRecords.read(run_dir)
    records.agree()

    resumed = machines.train(*short, "steps=9", "--resume", str(run_dir))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert names(run_dir / "checkpoints") == {"state_8", "state_9", "LATEST", "step_5", "step_9"}
    records = RunRecords.read(run_dir)
    records.agree()
    assert records.summary.groups.trained == records.summary.groups.drawn == 18


def test_rollouts_of_all_workers_are_in_the_run_directory(machines: Machines) -> None:
    run_dir = machines.hidden / "rollouts"
    done = machines.train("environment.workers=6", "steps=5", "--run-dir", str(run_dir))
    assert done.returncode == 0, done.stdout + done.stderr
    written = {name.split("-")[1] for name in names(run_dir / "rollouts")}
    abroad = {name for name in elsewhere(run_dir) if name.startswith("environment-")}
    assert abroad, "six workers, and none on the other machine"
    assert {name.split("-")[1] for name in abroad} & written, (abroad, written)


def test_a_directory_that_both_machines_see_is_written_by_all(machines: Machines) -> None:
    run_dir = machines.shared / "run"
    done = machines.train(
        ON_THE_OTHER, "environment.workers=4", "steps=3", "--run-dir", str(run_dir)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (run_dir / "elsewhere.jsonl").exists()
    assert not [name for name in names(run_dir) if name.startswith(".")]
    assert (run_dir / "logs" / "trainer-rank0.log").exists()
    RunRecords.read(run_dir).agree()


def test_several_ranks_that_do_not_see_one_directory_are_refused_with_the_fix(
    machines: Machines,
) -> None:
    run_dir = machines.hidden / "ranks"
    refused = machines.train(
        *("trainer.data_parallel=2", ON_THE_OTHER, "steps=3", "wandb.mode=disabled"),
        *("--run-dir", str(run_dir)),
        recipe=str(ROOT / "recipes" / "quickstart.yaml"),
    )
    assert refused.returncode == 1, refused.stdout + refused.stderr
    assert "does not see the driver's run directory" in refused.stderr
    assert f"{run_dir}. Several trainer ranks write one checkpoint together: put run_dir on a" in (
        refused.stderr
    )


def test_a_home_without_the_token_is_told_so(machines: Machines, tmp_path: Path) -> None:
    refused = machines.train("steps=1", "--run-dir", str(tmp_path / "run"), home=tmp_path)
    assert refused.returncode == 1
    line = refused.stderr.splitlines()
    told = next(each for each in line if each.startswith("offbeat:"))
    assert "asks for a token (InvalidAuthToken): there is none here" in told
    assert "~/.ray/auth_token" in told
    assert "Failed to connect" not in told


def test_a_wrong_token_is_told_as_one(machines: Machines, tmp_path: Path) -> None:
    home = give_token(tmp_path / "home")
    refused = machines.train("steps=1", "--run-dir", str(tmp_path / "run"), home=home)
    assert refused.returncode == 1
    assert "(InvalidAuthToken): the one here is different" in refused.stderr
