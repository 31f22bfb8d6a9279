"""A short run on prompts with pictures by the real command: the vision tower is trained and exported."""

from typing import Any

from transformers import AutoModelForImageTextToText

from tests.ray.conftest import ROOT, Start
from tests.support.run_records import RunRecords

RECIPE = ROOT / "recipes" / "quickstart-images.yaml"
STEPS, GROUPS = 6, 8


def test_a_run_on_pictures_trains_samples_and_exports_its_vision_tower(start: Start) -> None:
    small = (f"steps={STEPS}", f"groups_per_step={GROUPS}", "sync.canary_interval=1")
    with start("images", RECIPE, *small) as run:
        assert run.exit_code() == 0
        run.nothing_is_left()
        records = RunRecords.read(run.run_dir)
    records.agree()
    records.no_token_is_from_the_future()
    assert records.summary.groups.trained == STEPS * GROUPS
    assert max(records.summary.staleness_histogram) == 1
    assert all(0 < line["train/reward"] < 1 for line in records.metrics)
    exported, initial = (
        parameters_of(path)
        for path in (run.run_dir / "checkpoints" / f"step_{STEPS}", ROOT / "models/tiny-digits")
    )
    moved = {name for name in initial if not exported[name].equal(initial[name])}
    for part in ("vision_model", "connector", "text_model"):
        assert any(part in name for name in moved)


def parameters_of(path: Any) -> dict[str, Any]:
    model: Any = AutoModelForImageTextToText.from_pretrained(path, local_files_only=True)
    return dict(model.named_parameters())
