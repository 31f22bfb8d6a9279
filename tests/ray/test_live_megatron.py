"""Two tensor-parallel ranks of megatron-core behind Ray: one dies, the run goes on, and is resumed."""

import pytest

pytest.importorskip("megatron.core", reason="needs the extra megatron")

from offbeat.controller.events import Rewound
from tests.support.run_records import RunRecords
from tests.support.starting import ROOT, Start

RECIPE = ROOT / "recipes" / "deterministic.yaml"
SMALL = (
    "trainer.backend=megatron",
    "model.dtype=float64",  # rounding that depends on the layout is too small to change a sample
    "groups_per_step=4",
    "samples_per_group=4",
    "checkpoint.interval=3",
    "trainer.optimizer.schedule=constant",  # a resume takes more steps than were planned
)
COMPARED = ("train/loss", "train/grad_norm", "train/reward")


def test_a_run_that_lost_a_tensor_parallel_rank_and_was_resumed_is_the_run_of_one_rank(
    start: Start,
) -> None:
    with start("alone", RECIPE, *SMALL, "steps=40") as alone:
        assert alone.exit_code(within_s=600) == 0
    with start("two", RECIPE, *SMALL, "trainer.tensor_parallel=2", "steps=32") as two:
        two.logged("trainer.ready", within_s=450)
        two.trained_steps(4, within_s=300)
        two.holding("trainer-rank1.log").kill()
        assert two.exit_code(within_s=600) == 0
        two.nothing_is_left()
    with start("resumed", None, "steps=40", "--resume", str(two.run_dir)) as resumed:
        assert resumed.exit_code(within_s=600) == 0
    records = RunRecords.read(two.run_dir)
    records.no_token_is_from_the_future()
    rewound = [event for event in records.events if isinstance(event, Rewound)]
    assert len(rewound) == 1 and rewound[0].to_version % 3 == 0 < rewound[0].to_version
    assert records.summary.trainer_version == 40
    want = values_by_step(RunRecords.read(alone.run_dir))
    got = values_by_step(records)
    assert got.keys() == want.keys() == set(range(1, 41))
    assert any(want[step]["train/grad_norm"] for step in want)
    for step, values in want.items():
        assert got[step] == pytest.approx(values, rel=1e-6, abs=1e-9), step


def values_by_step(records: RunRecords) -> dict[int, dict[str, float]]:
    """What the last line of each step says."""
    return {line["step"]: {name: line[name] for name in COMPARED} for line in records.metrics}
