"""The script beside TRL's in ``examples/from_trl`` runs as it is written, with fewer steps."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import offbeat

ROOT: Final = Path(__file__).parents[2]
SCRIPTS: Final = ROOT / "examples" / "from_trl"


def test_the_script_trains_and_writes_a_model(tmp_path: Path) -> None:
    (tmp_path / "models").symlink_to(ROOT / "models")
    script = (SCRIPTS / "with_offbeat.py").read_text().replace("steps=300", "steps=2")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"}
    subprocess.run([sys.executable, "-c", script, "7"], cwd=tmp_path, env=environment, check=True)
    run = offbeat.open_run(tmp_path / "runs" / "with_offbeat")
    assert (run.summary["steps"], run.config.seed) == (2, 7)
    assert (run.directory.parent / "with_offbeat" / "model" / "model.safetensors").exists()


def test_both_scripts_reward_alike_and_ours_is_no_longer() -> None:
    ours, theirs = (
        (SCRIPTS / name).read_text().splitlines() for name in ("with_offbeat.py", "with_trl.py")
    )

    def reward(lines: list[str]) -> list[str]:
        start = lines.index("def correct(completions, answer, **kwargs):")
        return lines[start : start + 2]

    assert reward(ours) == reward(theirs)
    assert len(ours) <= len(theirs)
