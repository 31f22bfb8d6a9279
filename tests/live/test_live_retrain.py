"""`offbeat retrain` of real runs: it reproduces their steps, and shows other settings next to them."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.controller.events import Committed, Rewound, StepApplied
from offbeat.launch.commands.main import app
from offbeat.telemetry.records import read_metrics
from tests.support.run_records import RunRecords
from tests.support.starting import ROOT, Start

pytestmark = pytest.mark.plugins

RECIPE = ROOT / "recipes" / "quickstart.yaml"
STEPS = 8
SMALL = (
    f"steps={STEPS}",
    "groups_per_step=4",
    "samples_per_group=4",
    "generator.sampling.max_new_tokens=3",  # some samples run out of tokens
    "checkpoint.interval=3",
    "transfer_queue.spool=keep",
)
RICH = (
    *SMALL,
    "algorithm.loss.kl_coef=0.01",
    "algorithm.loss.old_logprobs=policy",
    "algorithm.minibatches=2",
    "algorithm.epochs=2",
    "trainer.optimizer.schedule=cosine",
    "trainer.optimizer.warmup_steps=2",
)


def retrain(run_dir: Path, *arguments: str) -> tuple[int, str]:
    """Return the exit code of the command, and all that it printed."""
    done = CliRunner().invoke(app, ["retrain", str(run_dir), *arguments])
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def recorded(start: Start) -> Path:
    """A finished run with a reference, several optimizer steps per step, and a schedule."""
    with start("recorded", RECIPE, *RICH) as run:
        assert run.exit_code() == 0
    return run.run_dir


@pytest.fixture
def copied(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "copy"))


def test_without_settings_every_step_equals_the_record_bit_for_bit(
    recorded: Path, tmp_path: Path
) -> None:
    before = sorted(recorded.rglob("*"))
    code, said = retrain(recorded, "--out", str(tmp_path / "again"))
    assert code == 0, said
    assert "starts at the initial model\n" in said
    assert f"metrics of {STEPS} steps (train/loss, train/grad_norm" in said
    assert f"{STEPS} x weights of the release; 3 x weights of the checkpoint" in said
    assert sorted(recorded.rglob("*")) == before
    facts = json.loads((tmp_path / "again" / "retrain.json").read_bytes())
    assert facts["difference"] == "" and facts["equal"]["train/kl_reference"] == STEPS
    rows = read_metrics(tmp_path / "again" / "metrics.jsonl")
    assert [row.version for row in rows] == list(range(1, STEPS + 1))
    want = read_metrics(recorded / "metrics.jsonl")
    assert [row.metrics["train/loss"] for row in rows] == [
        row.metrics["train/loss"] for row in want
    ]


def test_it_starts_at_the_nearest_checkpoint_and_says_so(recorded: Path, tmp_path: Path) -> None:
    code, said = retrain(recorded, "--from", "7", "--out", str(tmp_path / "again"))
    assert code == 0, said
    assert "starts at checkpoints/state_6, the newest state at or before 7" in said
    assert "metrics of 2 steps" in said


def test_a_planted_change_in_a_recorded_sample_is_found_by_its_step(
    copied: Path, tmp_path: Path
) -> None:
    events = RunRecords.read(copied).events
    steps = [each for each in events if isinstance(each, StepApplied)]
    group = next(each.prompt_indices[0] for each in steps if each.version == 5)
    receipts = [each.receipt for each in events if isinstance(each, Committed)]
    place = next(each.spooled for each in receipts if each.prompt_index == group)
    assert place is not None
    segment = copied / "spool" / place.segment
    changed = bytearray(segment.read_bytes())
    changed[place.offset + place.nbytes - 1] ^= 1
    segment.write_bytes(changed)
    code, said = retrain(copied, "--out", str(tmp_path / "again"))
    assert code == 1
    assert f"DIFFERS: step 5: recorded samples of g-{group:06d}" in said


def test_a_step_that_differs_is_named_with_the_first_quantity(copied: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    lines[3]["train/grad_norm"] *= 1 + 2**-50
    (copied / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, said = retrain(copied, "--out", str(tmp_path / "again"))
    assert code == 1
    assert f"DIFFERS: step 4: train/grad_norm: recorded {lines[3]['train/grad_norm']}" in said


def test_another_rate_shows_next_to_the_record(recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "again"
    override = "trainer.optimizer.learning_rate=3e-3"
    code, said = retrain(recorded, "--steps", "3", "--out", str(out), override)
    assert code == 0, said
    rows = [line.split() for line in said.splitlines() if line[:6].strip().isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert rows[2][1] != rows[2][2]
    was, now = read_metrics(recorded / "metrics.jsonl"), read_metrics(out / "metrics.jsonl")
    for old, new in zip(was, now, strict=False):
        rate = old.metrics["train/learning_rate"]
        assert new.metrics["train/learning_rate"] == pytest.approx(10 * rate)
        assert new.metrics["train/reward"] == old.metrics["train/reward"]
    report = CliRunner().invoke(app, ["report", str(out)])
    assert report.exit_code == 0, report.output
    assert (out / "report.html").is_file()
    resumed = CliRunner().invoke(app, ["train", "--resume", str(out)])
    assert resumed.exit_code == 2 and "offbeat retrain wrote it" in resumed.output


def test_another_mask_and_another_loss_train_on_the_same_data(
    recorded: Path, tmp_path: Path
) -> None:
    tokens = [row.metrics["train/tokens"] for row in read_metrics(recorded / "metrics.jsonl")]
    masks = ("rollout.truncated_samples=mask_loss", "algorithm.preset=dapo")
    code, said = retrain(recorded, "--out", str(tmp_path / "again"), "--steps", "2", *masks)
    assert code == 0, said
    masked = read_metrics(tmp_path / "again" / "metrics.jsonl")
    assert sum(row.metrics["train/tokens"] for row in masked) < sum(tokens[:2])


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("environment.options={low: 1, high: 9}", "prompts and rewards are recorded"),
        ("generator.sampling.temperature=0.5", "the samples are recorded"),
        ("sampler.max_staleness=2", "the groups of each step are recorded"),
        ("groups_per_step=2", "the groups of each step are recorded"),
        ("seed=3", "it chooses prompts"),
        ("rollout.drop_budget=3", "prompts and rewards are recorded"),
        ("model.dtype=bfloat16", "belong to the model of the run"),
        ("checkpoint.interval=1", "no trainer reads it"),
    ],
)
def test_a_setting_that_would_change_the_data_is_refused_with_the_reason(
    recorded: Path, override: str, reason: str
) -> None:
    code, said = retrain(recorded, override)
    assert code == 2
    assert override.partition("=")[0].partition(".")[0] in said and reason in said
    assert not recorded.with_name("recorded-retrain").exists()


def test_a_run_that_kept_no_tokens_is_refused_with_the_key_that_keeps_them(
    copied: Path, tmp_path: Path
) -> None:
    shutil.rmtree(copied / "spool")
    code, said = retrain(copied)
    assert code == 2
    assert "step 1: the tokens of g-" in said and "transfer_queue.spool=keep" in said
    missing = retrain(tmp_path / "nowhere")
    assert missing[0] == 2 and "no such directory" in missing[1]
    assert retrain(copied, "--from", str(STEPS))[1].count(f"it has trained {STEPS} steps") == 1


def test_a_killed_and_resumed_run_is_reproduced_without_its_rewound_steps(
    start: Start, tmp_path: Path
) -> None:
    with start("killed", RECIPE, *SMALL, "steps=14") as run:
        run.trained_steps(5)
        run.kill_everything()
    with start("killed", None, "--resume", str(run.run_dir)) as again:
        assert again.exit_code() == 0
    assert any(isinstance(each, Rewound) for each in RunRecords.read(run.run_dir).events)
    code, said = retrain(run.run_dir, "--out", str(tmp_path / "again"))
    assert code == 0, said
    assert "metrics of 14 steps" in said
