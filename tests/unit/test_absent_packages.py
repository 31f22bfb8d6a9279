"""A test that needs an extra is skipped where the extra is not installed, and no other test with it."""

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
OF_EXTRAS: Final = (
    "PIL",
    "agents",
    "math_verify",
    "megatron",
    "mlflow",
    "openai",
    "peft",
    "playwright",
    "reasoning_gym",
    "renderers",
    "smolagents",
    "tensorboard",
    "trl",
    "verifiers",
    "vllm",
    "wandb",
)
COLLECT: Final = f"""
import sys
sys.modules.update(dict.fromkeys({OF_EXTRAS!r}))  # a module that is None cannot be imported
import pytest
sys.exit(pytest.main(["--collect-only", "-qq", "-m", "", "-p", "no:cacheprovider"]))
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_without_any_extra_every_module_of_tests_is_still_collected() -> None:
    told = subprocess.run(
        [sys.executable, "-c", COLLECT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert told.returncode == 0, told.stdout[-2000:] + told.stderr[-2000:]
