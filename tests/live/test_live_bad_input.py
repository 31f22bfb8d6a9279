"""What users get wrong: each ends with a message that names the value and the way out."""

import json
from collections.abc import Iterator

import pytest

from tests.support.live_run import LiveRun
from tests.support.run_records import RunRecords
from tests.support.starting import ROOT, STUB, Start

QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
REWARD = """
import math
import time

def reward(prompt, response, api_key):
    match prompt.get("bad"):
        case "raise":
            raise LookupError(f"no answer at https://ada:hidden-secret-1@host with {api_key}")
        case "nan":
            return math.nan
        case "hang":
            time.sleep(600)
    return float(len(response))
"""

EXITING = """
import asyncio
import sys

from offbeat.environments.protocol import SingleTurn
from offbeat.environments.text import content_ids, encode_prompt

class Exiting(SingleTurn):
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def encode(self, prompt):
        return encode_prompt(prompt, self.tokenizer)

    async def score(self, task, result):
        bad = task.prompt.data.get("bad")
        if bad == "score":
            sys.exit(2)
        if bad == "callback" and task.attempt == 1:
            asyncio.get_running_loop().call_soon(sys.exit, 2)
        await asyncio.create_task(self.scored(bad))
        return [float(len(ids)) for ids in content_ids(result)]

    async def scored(self, bad):
        await asyncio.sleep(0.1)
        if bad == "task":
            sys.exit(2)
"""


def test_a_missing_model_is_named_before_anything_starts(start: Start) -> None:
    with start("no-model", QUICKSTART, "model.path=/nowhere/model") as run:
        assert run.exit_code() == 2
        assert "/nowhere/model is not a directory" in run.err
        assert "model.path" in run.err


@pytest.mark.only_ray
def test_an_actor_that_fits_no_machine_is_named_with_its_key(start: Start) -> None:
    with start("no-room", STUB, "trainer.cpus=640") as run:
        assert run.exit_code(within_s=180) == 1
        line = run.err.splitlines()[0]
        assert "trainer can never be scheduled: it asks for 640 CPU" in line
        assert "the largest machine of the cluster has" in line
        assert "Lower trainer.cpus" in line
        run.talks_to_people()
        run.nothing_is_left()


@pytest.fixture(scope="module")
def bad_rewards(
    start: Start, runtime: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, LiveRun]]:
    """Two runs, by their drop budget, whose first three prompts get no usable reward."""
    cwd = tmp_path_factory.mktemp("rewards")
    (cwd / "user_rewards.py").write_text(REWARD)
    rows = [{"prompt": "1+2=", "bad": bad} for bad in ("nan", "raise", "hang")]
    rows += [{"prompt": f"{number}+1="} for number in range(9)] * 4
    (cwd / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (
        "steps=4",
        "groups_per_step=4",
        "samples_per_group=2",
        f"data.path={cwd / 'prompts.jsonl'}",
        "data.shuffle=false",
        "environment.name=function",
        "environment.target=user_rewards:reward",
        "environment.options={api_key: hidden-secret-2}",
        "environment.reward_deadline_s=1",
        "rollout.data_retries=0",
    )
    with (
        start("none", QUICKSTART, *settings, cwd=cwd) as none,
        start("three", QUICKSTART, *settings, "rollout.drop_budget=3", cwd=cwd) as three,
    ):
        if runtime == "ray":
            for run in (none, three):
                run.actor("ControllerActor")  # its processes are known, however soon it is over
        none.exit_code()
        three.exit_code()
        yield {0: none, 3: three}


def test_no_secret_that_a_reward_puts_into_its_exception_is_written_or_shown(
    bad_rewards: dict[int, LiveRun],
) -> None:
    run = bad_rewards[3]
    written = [file.read_bytes() for file in run.run_dir.rglob("*") if file.is_file()]
    told = b"".join([*written, run.out.encode(), run.err.encode()])
    assert b"no answer at https://[redacted]@host with [redacted]" in told
    assert b"hidden-secret" not in told


def test_a_bad_reward_ends_the_run_when_no_drop_is_allowed(bad_rewards: dict[int, LiveRun]) -> None:
    run = bad_rewards[0]
    assert run.exit_code() == 1
    line = run.err.splitlines()[0]
    assert "or raise rollout.drop_budget: the limit is 0 dropped prompt groups" in line
    assert "reward_" in line
    kept = (run.run_dir / "failures.jsonl").read_text().splitlines()
    assert {"row", "response", "traceback", "engine", "version", "time"} < set(json.loads(kept[0]))
    run.talks_to_people()
    run.nothing_is_left()


def test_bad_rewards_within_the_budget_are_counted_by_reason(
    bad_rewards: dict[int, LiveRun],
) -> None:
    """One that raises, one that is NaN, one that hangs: none of them becomes a reward."""
    run = bad_rewards[3]
    assert run.exit_code() == 0
    records = RunRecords.read(run.run_dir)
    records.agree()
    assert records.summary.groups.dropped == {
        "reward_not_finite": 1,
        "reward_raised": 1,
        "reward_deadline": 1,
    }
    assert records.summary.groups.trained == 16
    run.talks_to_people()
    run.nothing_is_left()


@pytest.mark.long
def test_an_environment_that_exits_costs_its_groups_and_no_other(
    start: Start, runtime: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cwd = tmp_path_factory.mktemp("exits")
    (cwd / "exiting.py").write_text(EXITING)
    rows = [{"prompt": "1+2=", "bad": bad} for bad in ("score", "task", "callback")]
    rows += [{"prompt": f"{number}+1="} for number in range(9)] * 4
    (cwd / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with start(
        "exits",
        QUICKSTART,
        "steps=4",
        "groups_per_step=4",
        "samples_per_group=2",
        f"data.path={cwd / 'prompts.jsonl'}",
        "data.shuffle=false",
        "environment.name=custom",
        "environment.target=exiting:Exiting",
        "rollout.data_retries=0",
        "rollout.drop_budget=2",
        cwd=cwd,
    ) as run:
        assert run.exit_code() == 0, run.err
        records = RunRecords.read(run.run_dir)
        assert records.summary.groups.dropped == {"environment_raised": 2}
        assert records.summary.groups.trained == 16
        logs = "".join(log.read_text() for log in (run.run_dir / "logs").glob("*.log"))
        assert "SystemExit: 2" in logs
        # A process ends with its loop and is replaced; in one process the loop continues.
        assert ("event_loop.ended" in logs) is (runtime == "ray")
        assert ("event_loop.continued" in logs) is (runtime == "local")
