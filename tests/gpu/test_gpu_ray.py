"""Runs on Ray with trainer and engines on the device, as their operator sees them."""

import json
import random
import statistics
import time
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from offbeat.controller.events import Rewound
from tests.gpu.conftest import Measured
from tests.support.live_run import LiveRun, until
from tests.support.run_records import RunRecords

pytest.importorskip("ray", reason="Ray is not installed")

STEPS: Final = 20
SYNCED_STEPS: Final = 8
ENDLESS: Final = 100_000  # until the test stops the run
ROWS: Final = 200
FIGURES: Final = (
    ("time/step_s", "s"),
    ("sync/transfer_s", "s"),
    ("sync/pause_s", "s"),
    ("throughput/tokens_per_s", "tokens/s"),
)


def questions(folder: Path) -> Path:
    """Write rows in the form of GSM8K: a sum in words, and its answer after ####."""
    dice = random.Random(0)
    path = folder / "questions.jsonl"
    with path.open("w") as file:
        for _ in range(ROWS):
            a, b = dice.randrange(20), dice.randrange(20)
            question = f"Ann has {a} apples and buys {b}. How many has she?"
            answer = f"{a}+{b}={a + b}\n#### {a + b}"
            file.write(json.dumps({"question": question, "answer": answer}) + "\n")
    return path


def recipe(folder: Path, model: Path, device: str, steps: int, **sections: Any) -> Path:
    """Write a recipe, each release of which has a canary."""
    share = {"device": device} | ({"gpus": 0.4} if device == "cuda" else {})
    values: dict[str, Any] = {
        "name": "gpu",
        "seed": 0,
        "steps": steps,
        "groups_per_step": 8,
        "samples_per_group": 4,
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"path": str(questions(folder))},
        "environment": {"name": "gsm8k", "options": {"format": 0.1, "instruction": ""}},
        "sampler": {"name": "ready_first", "max_staleness": 1},
        "generator": share
        | {"backend": "embedded", "max_model_len": 256, "sampling": {"max_new_tokens": 32}},
        "trainer": share | {"backend": "torch", "optimizer": {"learning_rate": 1e-4}},
        "sync": {"canary_interval": 1},
        "wandb": {"mode": "disabled"},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def ended(run: LiveRun) -> RunRecords:
    assert run.exit_code() == 0
    records = RunRecords.read(run.run_dir)
    records.agree()
    records.no_token_is_from_the_future()
    run.nothing_is_left()
    return records


def test_twenty_steps_of_questions_end_with_a_canary_in_each_release(
    run_root: Path, model: Path, device: str, measured: Measured
) -> None:
    """An engine whose canary fails is not served, so a run that trains has passed each."""
    written = recipe(run_root, model, device, STEPS)
    with LiveRun(["train", str(written)], run_dir=run_root / "run", cwd=run_root) as run:
        records = ended(run)
        wall_s = run.wall_s
    assert len(records.metrics) == records.summary.trainer_version == STEPS
    assert records.summary.restarts == 0
    how = f"{model.name}, float32, 8 groups of 4 samples of 32 tokens, embedded engine"
    measured("run of 20 steps, start to end", wall_s, "s", how)
    for name, unit in FIGURES:
        values = [line[name] for line in records.metrics[2:] if name in line]
        assert values, name
        measured(f"{name}, median of a step", statistics.median(values), unit, how)


def test_an_engine_that_is_killed_comes_back_with_the_newest_weights(
    run_root: Path, model: Path, device: str, measured: Measured
) -> None:
    written = recipe(run_root, model, device, ENDLESS)
    with LiveRun(["train", str(written)], run_dir=run_root / "run", cwd=run_root) as run:
        run.trained_steps(4, within_s=300)
        victim = run.actor("EmbeddedEngineActor")
        victim.kill()
        until("the engine is gone", lambda: not victim.is_running(), within_s=30)
        killed_s = time.monotonic()
        run.trains_on(4, within_s=300)  # with a bound of one version, rolled out since
        lost_s = time.monotonic() - killed_s
        run.stop()
        records = ended(run)
    assert records.summary.restarts >= 1
    measured("kill -9 of the only engine, until 4 further steps", lost_s, "s", model.name)


def test_a_trainer_that_is_killed_goes_on_from_its_checkpoint(
    run_root: Path, model: Path, device: str, measured: Measured
) -> None:
    written = recipe(run_root, model, device, ENDLESS, checkpoint={"interval": 2})
    with LiveRun(["train", str(written)], run_dir=run_root / "run", cwd=run_root) as run:
        run.trained_steps(5, within_s=300)
        run.actor("TorchTrainerActor").kill()
        killed_s = time.monotonic()
        run.logged("run.rewound", within_s=300)
        rewound_s = time.monotonic() - killed_s
        run.trains_on(4, within_s=300)
        run.stop()
        records = ended(run)
    assert len([event for event in records.events if isinstance(event, Rewound)]) == 1
    measured("kill -9 of the trainer, until it is restored", rewound_s, "s", model.name)


def test_a_run_syncs_over_handles_with_a_canary_in_each_release(
    run_root: Path, model: Path, device: str, measured: Measured
) -> None:
    sync = {"transport": "reshard", "wire": "cuda_ipc" if device == "cuda" else "tcp"}
    written = recipe(run_root, model, device, SYNCED_STEPS, sync=sync)
    with LiveRun(["train", str(written)], run_dir=run_root / "run", cwd=run_root) as run:
        records = ended(run)
    assert records.summary.trainer_version == SYNCED_STEPS
    assert records.summary.restarts == 0
    for name, unit in FIGURES:
        if name.startswith("sync/"):
            values = [line[name] for line in records.metrics[2:] if name in line]
            measured(f"{name} over {sync['wire']}", statistics.median(values), unit, model.name)
