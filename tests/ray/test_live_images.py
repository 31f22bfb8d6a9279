"""The quickstart with images by the real command, cut after two steps and resumed."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL", reason="the extra vision is not installed")

from transformers import AutoModelForImageTextToText

from tests.ray.conftest import ROOT, Start
from tests.support.run_records import RunRecords

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

RECIPE = ROOT / "recipes" / "quickstart-images.yaml"
GROUPS = 4
SMALL = (
    f"groups_per_step={GROUPS}",
    "sync.canary_interval=1",
    "trainer.optimizer.schedule=constant",  # a resume takes more steps than were planned
    "trainer.optimizer.decay_steps=null",
    "sampler.name=in_order",  # this and the next two: the same weights, bit for bit
    "sampler.max_staleness=0",
    "generator.deterministic=true",
)


MEGATRON = (
    "trainer.backend=megatron",
    "trainer.tensor_parallel=2",
    "trainer.sequence_parallel=true",
)


@pytest.mark.parametrize("trainer", [(), MEGATRON], ids=["torch", "megatron"])
def test_a_resumed_run_on_images_ends_with_the_weights_of_one_that_was_not_cut(
    start: Start, trainer: tuple[str, ...]
) -> None:
    if trainer:
        pytest.importorskip("megatron.core", reason="needs the extra megatron")
    with (
        start("whole", RECIPE, "steps=4", *SMALL, *trainer) as whole,
        start("cut", RECIPE, "steps=2", *SMALL, *trainer) as cut,
    ):
        assert whole.exit_code(within_s=200) == cut.exit_code(within_s=200) == 0
    after_two = parameters(cut.run_dir / "checkpoints" / "step_2")
    with start("cut", None, "--resume", str(cut.run_dir), "steps=4") as resumed:
        assert resumed.exit_code(within_s=200) == 0
        resumed.nothing_is_left()
    runs = [RunRecords.read(run.run_dir) for run in (whole, resumed)]
    for records in runs:
        records.agree()
        records.no_token_is_from_the_future()
        assert records.summary.groups.trained == 4 * GROUPS
    assert runs[0].summary.weights_digest == runs[1].summary.weights_digest is not None

    initial = parameters(ROOT / "models" / "tiny-digits")
    after_four = parameters(resumed.run_dir / "checkpoints" / "step_4")
    for before, after in ((initial, after_two), (after_two, after_four)):
        moved = [name for name, values in after.items() if not values.equal(before[name])]
        for part in ("vision_model", "connector", "text_model"):
            assert any(part in name for name in moved), f"{part} was not trained, or not exported"


def parameters(path: Path) -> dict[str, Any]:
    model: Any = AutoModelForImageTextToText.from_pretrained(path, local_files_only=True)
    return dict(model.named_parameters())
