"""Supervised fine-tuning on a file by the real command, as the warm start of a run with engines."""

import pytest

from tests.support.run_records import RunRecords
from tests.support.starting import ROOT, Start

SFT, QUICKSTART = ROOT / "recipes" / "tiny-sft.yaml", ROOT / "recipes" / "quickstart.yaml"
SMALL = ("groups_per_step=32", "checkpoint.interval=4", "trainer.optimizer.schedule=constant")


def test_a_warm_start_trains_every_row_and_starts_no_engine(start: Start) -> None:
    with start("warm", SFT, "steps=15", *SMALL) as run:
        assert run.exit_code() == 0
        run.nothing_is_left()
        records = RunRecords.read(run.run_dir)
        engine_logs = list((run.run_dir / "logs").glob("generator-*"))
    records.agree()
    assert engine_logs == []
    assert records.summary.groups.trained == 15 * 32
    assert records.summary.reward_last is None, "nothing is rewarded"
    assert records.summary.loss == records.metrics[-1]["train/loss"]
    assert all(line["train/grad_norm"] > 0 for line in records.metrics)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_resumed_warm_start_is_equal_to_the_last_bit_and_taken_by_a_run_with_engines(
    start: Start,
) -> None:
    with start("whole", SFT, "steps=40", *SMALL) as whole:
        assert whole.exit_code() == 0
    with start("cut", SFT, "steps=20", *SMALL) as cut:
        assert cut.exit_code() == 0
    with start("cut", None, "--resume", str(cut.run_dir), "steps=40") as resumed:
        assert resumed.exit_code() == 0
    records = [RunRecords.read(run.run_dir) for run in (whole, resumed)]
    assert records[0].summary.weights_digest == records[1].summary.weights_digest is not None
    assert records[0].summary.groups.trained == records[1].summary.groups.trained == 40 * 32

    model = whole.run_dir / "checkpoints" / "step_40"
    with start("reinforced", QUICKSTART, "steps=5", f"model.path={model}") as reinforced:
        assert reinforced.exit_code() == 0
    reward = RunRecords.read(reinforced.run_dir).metrics[0]["train/reward"]
    assert reward > 0.35, "the quickstart's own model begins at 0.25"
