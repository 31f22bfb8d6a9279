"""Prompt files on the hub: what a run records of them, and what it reads when it goes on.

The client is the real one, in a process of its own: whether it may go online is decided when it is
imported.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.fake_hub import DATASET, FakeHub, serving

ROOT: Final = Path(__file__).parents[3]
PROGRAM: Final = """
import json, sys, urllib.request
from pathlib import Path
from offbeat.config.run import RunConfig
from offbeat.environments.factory import make_evaluation_sets, make_prompts
from offbeat.environments.hub_files import HubFilesError
from offbeat.runs.directory import RunDirUnusable, make_run_dir, reopen_run_dir
from offbeat.runs.inputs import input_digests, read_inputs

endpoint, place, mode = sys.argv[1:]
HUB = "hf://datasets/owner/sums"
found = {}


def config(path, **data):
    function = {"name": "function", "target": "math_verify"}
    held_out = {"interval": 1, "path": f"{HUB}/test.jsonl"}
    model = {"path": "models/none"}
    recipe = {"steps": 2, "model": model, "environment": function, "eval": held_out}
    return RunConfig.model_validate({**recipe, "run_dir": place, "data": {"path": path, **data}})


def rows(source):
    return sorted(source.prompt(row).data["prompt"] for row in range(source.rows))


def said(call, *args):
    try:
        return call(*args)
    except (HubFilesError, RunDirUnusable) as error:
        return str(error)


wanted = config(f"{HUB}/train-*.jsonl")
if mode == "online":
    run_dir = make_run_dir(wanted, Path(place))
    found["inputs"] = read_inputs(run_dir)
    urllib.request.urlopen(f"{endpoint}/move").close()
    found["nothing"] = said(input_digests, config(f"{HUB}/validation-*.jsonl"), run_dir)
    found["stranger"] = said(input_digests, config("hf://datasets/owner/none/a.jsonl"), run_dir)
    found["revision"] = said(input_digests, config(f"{HUB}@v9/train-*.jsonl"), run_dir)
    found["other"] = said(reopen_run_dir, config(f"{HUB}@{sys.stdin.read()}/train-*.jsonl"), run_dir)
    found["new run"] = input_digests(wanted, run_dir)
resumed = reopen_run_dir(wanted, Path(place))
resumed.accept()
run_dir = resumed.path
inputs = found["resumed"] = read_inputs(run_dir)
found["rows"] = rows(make_prompts(wanted, inputs))
found["held out"] = rows(make_evaluation_sets(wanted, inputs)[""])
if mode == "offline":
    found["cached"] = input_digests(wanted, run_dir)
    found["unknown"] = said(input_digests, config("hf://datasets/owner/none/a.jsonl"), run_dir)
    path = f"{HUB}/*.jsonl"
    found["missing"] = said(make_prompts, config(path), {path: inputs[f"{HUB}/test.jsonl"]})
print(json.dumps(found))
"""


def lines(*prompts: str) -> bytes:
    row = '{{"prompt": "{}", "answer": "1"}}\n'
    return "".join(row.format(prompt) for prompt in prompts).encode()


def reported(mode: str, endpoint: str, folder: Path, given: str = "") -> dict[str, Any]:
    """Run the program; return what it prints."""
    environ = os.environ | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1" if mode == "offline" else "0",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", PROGRAM, endpoint, str(folder / "run"), mode]
    done = subprocess.run(
        command, input=given, env=environ, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def hub() -> FakeHub:
    first = {
        "README.md": b"# Sums",
        "sums.py": b"raise SystemExit('the script of a dataset was run')",
        "train-0.jsonl": lines("a", "b"),
        "train-1.jsonl": lines("c"),
        "test.jsonl": lines("z"),
        "extra.jsonl": lines("x"),
    }
    return FakeHub(first, {**first, "train-1.jsonl": lines("d", "e")})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def online(hub: FakeHub, folder: Path) -> Iterator[dict[str, Any]]:
    with serving(hub) as endpoint:
        yield reported("online", endpoint, folder, hub.second)


@pytest.fixture(scope="module")
def offline(online: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same run goes on on a machine that has the cache alone."""
    del online
    return reported("offline", "http://127.0.0.1:9", folder)


TRAIN: Final = f"hf://datasets/{DATASET}/train-*.jsonl"
TEST: Final = f"hf://datasets/{DATASET}/test.jsonl"


def test_a_run_records_the_commit_of_each_path(online: dict[str, Any], hub: FakeHub) -> None:
    assert online["inputs"][TRAIN] == online["inputs"][TEST] == hub.first
    assert {"data.path", "eval.path"} <= online["inputs"].keys(), "and their content"


def test_a_run_goes_on_at_its_commit_after_the_branch_has_moved(
    online: dict[str, Any], hub: FakeHub
) -> None:
    assert online["new run"][TRAIN] == hub.second
    assert online["resumed"][TRAIN] == hub.first
    assert online["resumed"]["data.path"] != online["new run"]["data.path"]
    assert (online["rows"], online["held out"]) == (["a", "b", "c"], ["z"])


def test_another_commit_is_refused_by_name_where_it_has_other_prompts(
    online: dict[str, Any], hub: FakeHub
) -> None:
    assert "data.path has different prompts from those the run has drawn from" in online["other"]
    assert f"commit {hub.second}, but the run began with commit {hub.first}" in online["other"]


def test_a_pattern_without_a_file_is_told_with_the_files_there_are(online: dict[str, Any]) -> None:
    assert "is named 'validation-*.jsonl'" in online["nothing"]
    assert "It has extra.jsonl, test.jsonl, train-0.jsonl, train-1.jsonl" in online["nothing"]


def test_what_the_hub_does_not_have_is_said_with_the_way_out(online: dict[str, Any]) -> None:
    assert "the hub has no dataset owner/none, or it is private" in online["stranger"]
    assert "set HF_TOKEN" in online["stranger"]
    assert f"{DATASET} has no revision 'v9'. Name a branch" in online["revision"]


def test_a_run_goes_on_without_the_hub(offline: dict[str, Any], online: dict[str, Any]) -> None:
    assert offline["resumed"] == online["resumed"]
    assert offline["rows"] == ["a", "b", "c"]


def test_without_the_hub_a_dataset_that_is_not_in_the_cache_is_one_clear_error(
    offline: dict[str, Any],
) -> None:
    assert "the hub cannot be reached or is switched off by HF_HUB_OFFLINE" in offline["unknown"]
    fetch = "hf download owner/none --repo-type dataset --include 'a.jsonl' --local-dir DIRECTORY"
    assert fetch in offline["unknown"]


def test_without_the_hub_a_part_of_the_files_is_not_taken_for_all(offline: dict[str, Any]) -> None:
    assert "the cache lacks files" in offline["missing"]
