"""The example of docs/queue-service.md does what the page says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]


def test_the_example_of_the_page_runs() -> None:
    page = (ROOT / "docs" / "queue-service.md").read_text()
    example = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert example is not None
    finished = subprocess.run(
        [sys.executable, "-c", example.group(1)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines() == [
        "['prompt-0', 'prompt-1'] [0. 1. 0. 1.]",
        "['prompt-2', 'prompt-3'] [0. 1. 0. 1.]",
    ]
