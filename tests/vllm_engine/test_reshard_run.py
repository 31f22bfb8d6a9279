"""A whole run on Ray: two trainer ranks, and a vLLM engine whose workers fetch what they load."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.weight_sync.engine_layout import read_layout
from tests.support.run_records import RunRecords

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart-vllm.yaml"
SETTINGS = (
    "steps=6",
    "groups_per_step=4",
    "samples_per_group=4",
    "trainer.data_parallel=2",
    "sync.transport=reshard",
    "sync.canary_interval=1",
    "wandb.mode=disabled",
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_two_trainer_ranks_send_a_vllm_engine_what_it_loads_and_every_canary_passes(
    tmp_path: Path, tensor_parallel: int
) -> None:
    run_dir = tmp_path / "run"
    parallel = f"generator.vllm.tensor_parallel={tensor_parallel}"
    command = [sys.executable, "-m", "offbeat", "train", str(QUICKSTART), *SETTINGS, parallel]
    done = subprocess.run(
        [*command, "--run-dir", str(run_dir)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = RunRecords.read(run_dir)
    records.agree()
    records.no_token_is_from_the_future()
    assert records.summary.trainer_version == 6
    assert len(read_layout(run_dir).ranks) == tensor_parallel
    logged = [
        json.loads(line)
        for line in (run_dir / "logs" / "generator-0.log").read_text().splitlines()
        if line.startswith("{")
    ]
    events = [each["event"] for each in logged]
    assert "weights.layout_recorded" in events
    assert "weights.whole_tensors" not in events
    assert records.summary.restarts == 0, (
        "a canary that fails makes an engine sync anew, or restart"
    )
    assert "engine.stale" not in events
