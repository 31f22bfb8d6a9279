"""A model of the hub is downloaded once, at one commit, without what is not staged.

The client is the real one, in a process of its own: whether it may go online is decided when it is
imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from tests.support.fake_hub import DATASET, FakeHub, serving

ROOT: Final = Path(__file__).parents[3]
FILES: Final = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"a pickle",
    "original/consolidated.00.pth": b"another",
}
PROGRAM: Final = """
import json
from offbeat.staging.hub_model import downloaded, hub_model
from offbeat.staging.manifest import NothingToStage
from offbeat.staging.progress import ProgressMeter


def said(name):
    try:
        downloaded(hub_model(name), ProgressMeter())
    except NothingToStage as refused:
        return str(refused)


meter = ProgressMeter()
folder = downloaded(hub_model("owner/sums"), meter).folder
files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
found = {"files": files, "commit": folder.name, "bytes": meter.now.total_bytes}
found |= {name: said(name) for name in ("owner/none", "owner/sums@v9", "owner/sums@%s")}
print(json.dumps(found))
"""


def test_a_model_of_the_hub_is_downloaded_at_one_commit_and_its_pickles_are_not(
    tmp_path: Path,
) -> None:
    hub = FakeHub(FILES, {"config.json": b"{}", "pytorch_model.bin": b"a pickle"})
    with serving(hub) as endpoint:
        found = staged(endpoint, tmp_path, hub.second)
    assert found["files"] == ["config.json", "model.safetensors"]
    assert found["commit"] == hub.first
    assert found["bytes"] >= len(FILES["model.safetensors"])
    assert not any("pytorch_model.bin" in path or "original" in path for path in hub.requests)
    assert "no such model on the hub" in found["owner/none"]
    assert found["owner/sums@v9"] == (
        f"{DATASET}: it has no revision 'v9'. Name a branch, a tag or a commit"
    )
    assert "its weights are pickles (pytorch_model.bin)" in found[f"owner/sums@{hub.second}"]


def staged(endpoint: str, place: Path, pickled: str) -> dict[str, Any]:
    """What the program finds with this hub."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    variables = {**plain, "HF_ENDPOINT": endpoint, "HF_HOME": str(place), "HF_HUB_OFFLINE": "0"}
    program = PROGRAM.replace("%s", pickled)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
