"""The quickstart with images by the real command: resumed, with turns, adapters, ranks, evaluations."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL", reason="the extra vision is not installed")

from PIL import Image
from transformers import AutoModelForImageTextToText

from offbeat.controller.events import Committed
from offbeat.plugins.images.digits import picture
from offbeat.telemetry.evaluation_files import evaluation_files, read_evaluation
from tests.support.run_records import RunRecords
from tests.support.starting import ROOT, Start

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

RECIPE = ROOT / "recipes" / "quickstart-images.yaml"
GROUPS = 4
SMALL = (
    f"groups_per_step={GROUPS}",
    "sync.canary_interval=1",
    "trainer.optimizer.schedule=constant",  # a resume takes more steps than were planned
    "sampler.name=in_order",  # this and the next two: the same weights, bit for bit
    "sampler.max_staleness=0",
    "generator.deterministic=true",
)

GAP_NATS = 1e-4
"""Largest difference of a sampled token's logprob between engine and trainer, both in float32."""

TRIES = """
from offbeat.environments.protocol import Episode, MultiTurn


class Tries(MultiTurn):
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def encode(self, prompt):
        raise ValueError("a row with a picture is encoded by the model's processor")

    def begin(self, task, sample):
        return Try(self.tokenizer, str(task.prompt.data["answer"]))


class Try(Episode):
    def __init__(self, tokenizer, answer):
        self.tokenizer, self.answer, self.right = tokenizer, answer, False

    async def step(self, response):
        self.right = self.tokenizer.decode(response.content_ids) == self.answer
        return None if self.right else tuple(self.tokenizer.encode("?="))

    async def reward(self):
        return float(self.right)
"""


def test_a_resumed_run_on_images_ends_with_the_weights_of_one_that_was_not_cut(
    start: Start,
) -> None:
    with (
        start("whole", RECIPE, "steps=4", *SMALL) as whole,
        start("cut", RECIPE, "steps=2", *SMALL) as cut,
    ):
        assert whole.exit_code(within_s=600) == cut.exit_code(within_s=600) == 0
    after_two = parameters(cut.run_dir / "checkpoints" / "step_2")
    with start("cut", None, "--resume", str(cut.run_dir), "steps=4") as resumed:
        assert resumed.exit_code(within_s=600) == 0
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


def test_each_turn_of_an_episode_is_sampled_and_trained_behind_its_picture(
    start: Start, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cwd = tmp_path_factory.mktemp("tries")
    (cwd / "tries.py").write_text(TRIES)
    rows = list[str]()
    for index in range(3 * GROUPS):
        digit = picture(0, index)
        Image.fromarray(digit.pixels).save(cwd / f"{index}.png")
        rows.append(
            json.dumps({"prompt": "<image>=", "image": f"{index}.png", "answer": digit.digit})
        )
    (cwd / "rows.jsonl").write_text("\n".join(rows))
    settings = (
        "steps=3",
        "environment.name=custom",
        "environment.target=tries:Tries",
        "environment.max_turns=3",
        f"data.path={cwd / 'rows.jsonl'}",
        "generator.max_model_len=32",
    )
    with start("turns", RECIPE, *SMALL, *settings, cwd=cwd) as run:
        assert run.exit_code(within_s=600) == 0, run.err
        records = RunRecords.read(run.run_dir)
    agree_with_the_trainer(records, steps=3)
    turns = [
        count
        for event in records.events
        if isinstance(event, Committed)
        for count in event.receipt.turns
    ]
    assert set(turns) == {1, 2, 3}, "a right answer ends an episode, a wrong one has three turns"


@pytest.mark.only_ray
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "adapters"])
def test_two_ranks_train_on_pictures_and_are_evaluated_on_others(
    start: Start, adapters: bool
) -> None:
    settings = (
        "steps=2",
        "trainer.data_parallel=2",
        "eval.interval=1",
        "eval.sets.held={prompts: 6, samples: 2}",
        *(("trainer.lora.rank=4",) if adapters else ()),
    )
    with start(f"ranks{adapters:d}", RECIPE, *SMALL, *settings) as run:
        assert run.exit_code(within_s=300) == 0, run.err
        run.nothing_is_left()
        records = RunRecords.read(run.run_dir)
    agree_with_the_trainer(records, steps=2)
    scored = {due: read_evaluation(path).samples for due, path in evaluation_files(run.run_dir)}
    assert {due: len(samples) for due, samples in scored.items()} == {1: 12, 2: 12}

    initial = parameters(ROOT / "models" / "tiny-digits")
    trained = parameters(run.run_dir / "checkpoints" / "step_2")
    moved = [name for name, values in trained.items() if not values.equal(initial[name])]
    for part in ("vision_model", "connector", "text_model"):
        assert any(part in name for name in moved), f"{part} was not trained, or not exported"
    if adapters:
        assert all(trained[name].ndim == 2 for name in moved), "only matrices have adapters"


def test_a_model_that_reads_pictures_is_evaluated_alone(start: Start) -> None:
    settings = ("eval.sets.held={prompts: 12, samples: 2}", "generator.engines=2")
    with start("alone", RECIPE, *settings, command="eval") as run:
        assert run.exit_code(within_s=600) == 0, run.err
        ((_, path),) = evaluation_files(run.run_dir)
        samples = read_evaluation(path).samples
    assert len(samples) == 24
    rewards = {sample.reward for sample in samples}
    assert rewards == {0.0, 1.0}, "one answer in four is right"


def agree_with_the_trainer(records: RunRecords, *, steps: int) -> None:
    """All groups were trained, and the trainer finds each token as likely as the engine did."""
    records.agree()
    records.no_token_is_from_the_future()
    assert records.summary.groups.trained == steps * GROUPS
    gap = "off_policy/logprob_gap_max"
    gaps = [line[gap] for line in records.metrics if gap in line]  # others are of evaluations
    assert len(gaps) == steps
    assert max(gaps) < GAP_NATS


def parameters(path: Path) -> dict[str, Any]:
    model: Any = AutoModelForImageTextToText.from_pretrained(path, local_files_only=True)
    return dict(model.named_parameters())
