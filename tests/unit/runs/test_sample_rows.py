"""Rows of the samples that a step has trained."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from msgspec.structs import replace

from offbeat.messages.groups import Prompt, RolloutTask
from offbeat.rollouts.log_table import build_table
from offbeat.rollouts.rollout_log import LoggedGroup
from offbeat.runs.results import sample_rows
from tests.support.recorded_runs import RecordedRun, receipt


def test_a_row_of_a_branched_sample_counts_and_shows_all_its_branches(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{steps: 1, model: {path: none}}")
    run = RecordedRun(tmp_path)
    index = run.ledger.admit(None)
    attempt = run.ledger.dispatch(index, "generator-1", 0)
    made = replace(receipt(index, attempt, 0), branches=(2, 1))
    run.ledger.commit(made)
    run.train([index])
    run.journal.flush_now()
    run.close()
    columns = {
        "prompt_ids": np.array([1], dtype=np.int32),
        "response_ids": np.arange(14, dtype=np.int32),
        "response_offsets": np.array([0, 2, 5, 14], dtype=np.int64),
    }
    task = RolloutTask(Prompt(index, 0, 0, {"prompt": "hi"}), attempt, 2, "generator-1", 0, 60.0)
    logged = LoggedGroup(task, made, columns, texts=("sub-agent", "agent", "other"))
    (tmp_path / "rollouts").mkdir()
    pq.write_table(build_table([logged]), tmp_path / "rollouts" / "0.parquet")
    branched, other = sample_rows(tmp_path)
    both = "[branch 1 of 2]\nsub-agent\n[branch 2 of 2]\nagent"
    assert (branched["branches"], branched["tokens"], branched["response"]) == (2, 5, both)
    assert (other["branches"], other["tokens"], other["response"]) == (1, 9, "other")
