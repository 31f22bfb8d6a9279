"""Sweeps of real trainers: the search for the largest budget, a sweep that is killed, megatron-core."""

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.trainer_cases import write_model
from offbeat.plugins.planning.sweep import TOKENS
from offbeat.plugins.planning.sweep_points import SweepPoint

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are of Linux"),
]
ROOT: Final = Path(__file__).resolve().parents[3]
FIRST: Final = 8192
UNIT: Final = FIRST // 4
SAMPLES: Final = 96
LENGTHS: Final = ("--lengths", "mean=400,prompt=8", "--steps", "1")
SEARCH: Final = ("--largest", "--memory-mib", "60")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path, model = tmp_path / "recipe.yaml", write_model("toy", tmp_path / "toy")
    path.write_text(
        f"extends: {ROOT / 'recipes' / 'quickstart.yaml'}\nmodel: {{path: {model}}}\n"
        f"groups_per_step: 1\nsamples_per_group: {SAMPLES}\n"
        f"trainer: {{shared_prompt: false, max_tokens_per_microbatch: {FIRST}}}\n"
    )
    return path


def started(recipe: Path, out: Path, *more: str) -> subprocess.Popen[bytes]:
    program = "from offbeat.launch.commands.main import app; app()"
    return subprocess.Popen(
        [sys.executable, "-c", program, "sweep", str(recipe), "--out", str(out), *LENGTHS, *more],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finished(recipe: Path, out: Path, *more: str) -> str:
    process = started(recipe, out, *more)
    said, _ = process.communicate()
    assert process.returncode == 0, said.decode()
    return said.decode()


def points_of(out: Path) -> list[SweepPoint]:
    _, *lines = out.read_bytes().splitlines()
    return [msgspec.json.decode(line, type=SweepPoint) for line in lines]


def budget_of(point: SweepPoint) -> int:
    return int(point.settings[0].removeprefix(f"{TOKENS}="))


def killed_after_its_first_point(recipe: Path, out: Path) -> bytes:
    """Start the search, kill it outright once it has measured a point, and return its file."""
    process = started(recipe, out, *SEARCH)
    assert process.stdout is not None
    said = b""
    while TOKENS.encode() not in (line := process.stdout.readline()):  # or a warning of a library
        assert line, f"it ended without a point: {said.decode()}"
        said += line
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return out.read_bytes()


def test_the_largest_budget_under_a_limit_is_found_also_by_a_sweep_that_was_killed(
    recipe: Path, tmp_path: Path
) -> None:
    out = tmp_path / "killed.jsonl"
    before = killed_after_its_first_point(recipe, out)
    half = before.rpartition(b"\n")[0] + b"\n"
    finished(recipe, out, *SEARCH)
    after = out.read_bytes()
    assert after.startswith(half), "what was measured is kept as it was"
    assert len(after) > len(half)
    found = points_of(out)
    budgets = [budget_of(each) for each in found]
    assert len(set(budgets)) == len(budgets), "no setting is measured twice"
    assert {each.outcome for each in found} == {"ok", "out_of_memory"}
    largest = max(budget_of(each) for each in found if each.outcome == "ok")
    refused = min(budget_of(each) for each in found if each.outcome == "out_of_memory")
    assert largest >= FIRST
    assert refused == largest + UNIT, "the answer is exact to a step of the search"

    finished(recipe, out, *SEARCH)
    assert out.read_bytes() == after, "a sweep that is complete measures nothing"


@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)
def test_a_megatron_trainer_is_measured(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "megatron.jsonl"
    more = ("trainer.backend=megatron", "samples_per_group=4")
    said = finished(recipe, out, *more)
    (point,) = points_of(out)
    assert point.outcome == "ok", said
    assert (point.ranks, point.parameters, point.tokens) == (1, 3_392, 4 * 408)
    assert point.peak_mib > 0
    assert point.step_s > 0
    assert {"train", "finish"} <= point.phases_s.keys() & point.phases_mib.keys()
    assert point.held_mib == 4 * 4 * 3_392 / 2**20
    assert point.activations_mib is None


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_estimate_is_within_a_fifth_of_the_measured_memory(
    tmp_path: Path, recomputed: bool
) -> None:
    config = Qwen3Config(
        vocab_size=8000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "points.jsonl"
    recipe.write_text(
        f"extends: {ROOT / 'recipes' / 'quickstart.yaml'}\nmodel: {{path: {tmp_path / 'model'}}}\n"
        "groups_per_step: 1\nsamples_per_group: 4\n"
        f"trainer: {{activation_checkpointing: {str(recomputed).lower()}}}\n"
    )
    said = finished(recipe, out, "--memory-mib", "2000")
    (point,) = points_of(out)
    assert point.outcome == "ok", said
    assert point.held_mib
    assert point.held_mib == pytest.approx(4 * 4 * point.parameters / 2**20, rel=1e-4)
    assert point.held_mib > 400
    assert point.activations_mib
    assert point.activations_mib > 100
    assert point.held_mib + point.activations_mib == pytest.approx(point.peak_mib, rel=0.2)
