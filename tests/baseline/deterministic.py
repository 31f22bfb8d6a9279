"""The deterministic recipe on real actors: weights, losses, and each group's part of the journal."""

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from offbeat.controller.events import Committed, StepApplied
from tests.support.run_records import RunRecords

RECIPE = "recipes/deterministic.yaml"
DEADLINE_S = 600


def deterministic_run() -> dict[str, object]:
    """Train the recipe; return the digest of its weights, its losses and what its journal says.

    Times and identities differ from run to run, so the journal counts by its groups and steps. Sums
    of floats depend on the processor: on another one, record the baseline's commit anew first.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "offbeat", "train", RECIPE, f"run_dir={run_dir}"]
        done = subprocess.run(
            command, check=False, timeout=DEADLINE_S, capture_output=True, text=True
        )
        if done.returncode:
            message = f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}"
            raise RuntimeError(message)
        records = RunRecords.read(run_dir)
    receipts = sorted(
        (
            event.receipt.prompt_index,
            event.receipt.attempt,
            event.receipt.rewards,
            event.receipt.response_tokens,
        )
        for event in records.events
        if isinstance(event, Committed)
    )
    steps = [
        (event.step, event.version, *sorted(event.prompt_indices))
        for event in records.events
        if isinstance(event, StepApplied)
    ]
    return {
        "processor": f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}",
        "weights": records.summary.weights_digest,
        "losses": [repr(line["train/loss"]) for line in records.metrics],
        "groups": f"{len(receipts)}: {_digest(receipts)}",
        "steps": f"{len(steps)}: {_digest(steps)}",
    }


def _digest(rows: Sequence[tuple[object, ...]]) -> str:
    return hashlib.blake2b(repr(rows).encode(), digest_size=16).hexdigest()
