"""Runs of a text model with adapters by the real command: cut and resumed, on one rank and on two."""

from pathlib import Path

import pytest

pytest.importorskip("peft", reason="the extra lora is not installed")

from safetensors.numpy import load_file

from tests.support.run_records import RunRecords
from tests.support.starting import ROOT, Start

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

RECIPE = ROOT / "recipes" / "deterministic.yaml"
SMALL = (
    "groups_per_step=4",
    "samples_per_group=4",
    "sync.canary_interval=1",
    "trainer.lora={rank: 4, alpha: 8}",
    "trainer.optimizer.learning_rate=3.0e-3",
    "trainer.optimizer.schedule=constant",  # a resume takes more steps than were planned
)

GAP_NATS = 1e-4
"""Largest difference of a sampled token's logprob between engine and trainer, both in float32."""


def test_a_resumed_run_of_adapters_ends_with_the_weights_of_one_that_was_not_cut(
    start: Start,
) -> None:
    check_resumed(start, ranks=1)


@pytest.mark.only_ray
def test_so_does_one_of_two_ranks(start: Start) -> None:
    check_resumed(start, ranks=2)


def check_resumed(start: Start, ranks: int) -> None:
    """Cut a run of adapters, resume it, and compare it with one that was not cut."""
    settings = (*SMALL, f"trainer.data_parallel={ranks}")
    with start(f"whole{ranks}", RECIPE, "steps=4", *settings) as whole:
        assert whole.exit_code(within_s=750) == 0, whole.err
    with start(f"cut{ranks}", RECIPE, "steps=2", *settings) as cut:
        assert cut.exit_code(within_s=750) == 0, cut.err
    after_two = RunRecords.read(cut.run_dir).summary.weights_digest
    with start(f"cut{ranks}", None, "--resume", str(cut.run_dir), "steps=4") as resumed:
        assert resumed.exit_code(within_s=750) == 0, resumed.err
        resumed.nothing_is_left()
    runs = [RunRecords.read(run.run_dir) for run in (whole, resumed)]
    for records in runs:
        records.agree()
        records.no_token_is_from_the_future()
        gaps = [line["off_policy/logprob_gap_max"] for line in records.metrics]
        assert len(gaps) == 4
        assert max(gaps) < GAP_NATS
    digests = [records.summary.weights_digest for records in runs]
    assert digests[0] == digests[1] != after_two
    assert None not in (digests[0], after_two)
    exports = [adapter_files(run.run_dir) for run in (whole, resumed)]
    assert exports[0] == exports[1]


def adapter_files(run_dir: Path) -> dict[str, bytes]:
    """The exported adapters by name; all of them have been trained."""
    adapter = run_dir / "checkpoints" / "step_4" / "adapter"
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert all(values.any() for values in tensors.values()), "B of an untrained adapter is zero"
    return {name: values.tobytes() for name, values in tensors.items()}
