"""``model.path: OWNER/NAME``: a model of the hub is downloaded once, and the run reads its directory.

The client of the hub is the real one, in a process of its own: it reads its variables when it is
imported.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import pytest

from offbeat.config.hub_path import name_of_copy
from offbeat.config.loader import load_recipe
from offbeat.config.problems import ConfigError
from tests.support.fake_hub import DATASET, FakeHub, serving

ROOT: Final = Path(__file__).parents[3]
MODEL: Final = {
    path.name: path.read_bytes()
    for path in sorted((ROOT / "models/tiny-addition").iterdir())
    if path.name != "README.md"
}
FIND: Final = (
    "import sys\n"
    "from offbeat.launch.hub_model import find_or_download\n"
    "print(find_or_download(sys.argv[1], lambda line: print(line, file=sys.stderr)))"
)


class Served:
    """A hub with one model, and this machine's copy of it."""

    def __init__(self, hub: FakeHub, endpoint: str, home: Path) -> None:
        self.hub, self.endpoint, self.home = hub, endpoint, home

    def process(self, *args: str, is_online: bool = True) -> subprocess.CompletedProcess[str]:
        """Run Python with the variables of this hub."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        ours = {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(self.home),
            "HF_HUB_OFFLINE": "0" if is_online else "1",
        }
        return subprocess.run(
            [sys.executable, *args],
            cwd=ROOT,
            env=kept | ours,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def find(self, name: str, *, is_online: bool = True) -> subprocess.CompletedProcess[str]:
        return self.process("-c", FIND, f"hf://{name}", is_online=is_online)

    def directory(self, name: str, *, is_online: bool = True) -> Path:
        found = self.find(name, is_online=is_online)
        assert found.returncode == 0, found.stderr
        return Path(found.stdout.strip())


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    hub = FakeHub(MODEL, MODEL | {"README.md": b"of a later commit"})
    with serving(hub) as endpoint:
        yield Served(hub, endpoint, tmp_path / "home")


def test_a_recipe_that_names_a_model_of_the_hub_is_checked_with_its_weights(served: Served) -> None:
    setting = f"model.path={DATASET}"
    done = served.process("-m", "offbeat", "check", "recipes/quickstart.yaml", setting)
    assert done.returncode == 0, done.stdout + done.stderr
    total = sum(map(len, MODEL.values()))
    assert f"model {DATASET}: {len(MODEL)} files, {total:,} bytes to {served.home}" in done.stderr
    assert f"offbeat/owner--sums/{served.hub.first}: " in done.stdout


def test_a_commit_is_downloaded_once_and_a_revision_is_asked_for_each_time(served: Served) -> None:
    first = served.directory(DATASET)
    assert first.name == served.hub.first
    assert {path.name: path.read_bytes() for path in first.iterdir() if path.is_file()} == MODEL
    asked = len(served.hub.requests)
    assert served.directory(f"{DATASET}@{served.hub.first}") == first
    assert len(served.hub.requests) == asked, "a commit that is there needs no hub"
    httpx.get(f"{served.endpoint}/move")
    assert served.directory(DATASET).name == served.hub.second


def test_without_a_network_the_last_copy_of_a_revision_is_used_and_named(served: Served) -> None:
    refused = served.find(DATASET, is_online=False)
    assert "HubUnreachable" in refused.stderr
    assert "no directory has that name, and as a model of the hub" in refused.stderr
    assert "Go online, or run hf download OWNER/NAME --local-dir DIRECTORY" in refused.stderr
    there = served.directory(DATASET)
    again = served.find(DATASET, is_online=False)
    assert Path(again.stdout.strip()) == there
    assert f"The copy of commit {there.name} is used" in again.stderr


def test_a_copy_in_the_cache_of_the_hub_s_client_is_used_if_it_is_whole(served: Served) -> None:
    def cache(*options: str) -> None:
        script = f"from huggingface_hub import snapshot_download\nsnapshot_download({options[0]})"
        assert served.process("-c", script).returncode == 0

    cache(f"{DATASET!r}, allow_patterns=['config.json']")
    assert served.directory(DATASET).parent.parent == served.home / "offbeat", "not whole"
    cache(repr(DATASET))
    held = served.directory(DATASET)
    assert held.parent.name == "snapshots"
    assert name_of_copy(str(held)) == f"hf://{DATASET}@{served.hub.first}"
    assert served.directory(DATASET, is_online=False) == held
    (held / "model.safetensors").resolve().write_bytes(b"cut")
    assert served.directory(DATASET).parent.parent == served.home / "offbeat", "not whole"


def test_a_download_that_was_cut_off_is_never_taken_for_a_model(served: Served) -> None:
    part = served.home / "offbeat" / DATASET.replace("/", "--") / f"{served.hub.first}.part"
    part.mkdir(parents=True)
    (part / "model.safetensors").write_bytes(b"half")
    assert "HubUnreachable" in served.find(DATASET, is_online=False).stderr
    whole = served.directory(DATASET)
    assert (whole / "model.safetensors").read_bytes() == MODEL["model.safetensors"]


def test_a_name_that_is_neither_on_the_hub_nor_a_directory_says_both(served: Served) -> None:
    setting = "model.path=owner/none"
    done = served.process("-m", "offbeat", "check", "recipes/quickstart.yaml", setting)
    assert done.returncode == 2
    assert (
        "model.path=owner/none: no directory has that name, and as a model of the hub: the "
        "hub has no model owner/none, or it is private" in " ".join(done.stdout.split())
    )


def test_a_directory_comes_before_a_model_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ["steps=1", f"model.path={DATASET}"]
    assert load_recipe(None, settings).config.model.path == f"hf://{DATASET}"
    (tmp_path / DATASET).mkdir(parents=True)
    assert load_recipe(None, settings).config.model.path == str(tmp_path / DATASET)


@pytest.mark.parametrize("path", ["../models/tiny", "./models/tiny", "models", "a/b/c", "/a/b"])
def test_what_has_no_form_of_a_name_stays_a_path(path: str) -> None:
    config = load_recipe(None, ["steps=1", f"model.path={path}"]).config
    assert config.model.path == os.path.normpath(Path.cwd() / path)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model.path=hf://sums", "model.path=hf://sums names no model"),
        ("algorithm.loss.teacher=hf://owner/sums", "teacher=hf://owner/sums is not downloaded"),
    ],
)
def test_other_names_of_the_hub_are_refused_with_what_to_write(setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_recipe(ROOT / "recipes/quickstart.yaml", [setting])


def test_the_directory_of_a_copy_tells_which_model_it_is() -> None:
    commit = "0123456789" * 4
    copy = f"/cache/offbeat/Qwen--Qwen3-0.6B/{commit}"
    assert name_of_copy(copy) == f"hf://Qwen/Qwen3-0.6B@{commit}"
    assert name_of_copy("/models/Qwen--Qwen3-0.6B") is None
