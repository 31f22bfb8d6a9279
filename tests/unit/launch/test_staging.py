"""``offbeat stage``: a download that hangs is killed and continued; files are whole, or not there.

The client is the real one, in a process of its own: whether it may go online is decided when it is
imported.
"""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from offbeat.config.hub_path import hub_model
from offbeat.launch.hub_snapshot import CannotStage, HubSnapshot, is_wanted
from offbeat.launch.stage import ChildDownload, DownloadProgress, progress, stage_model, supervise
from offbeat.messages.exit_codes import FAILED, FINISHED, REFUSED
from tests.support.fake_hub import DATASET, FakeHub, serving

ROOT: Final = Path(__file__).parents[3]
LIMIT_S: Final = 30.0
FILES: Final = {
    "1.safetensors": b"first shard",
    "2.safetensors": b"second shard",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
    "config.json": b"{}",
}
ON_HUB: Final = FILES | {"pytorch_model.bin": b"a pickle", "original/consolidated.00.pth": b"other"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Serve a hub to the child processes of the test."""
    served = FakeHub(ON_HUB, {"config.json": b"{}", "pytorch_model.bin": b"a pickle"})
    with serving(served) as endpoint:
        for name in [name for name in os.environ if name.startswith(("HF_", "RAY_"))]:
            monkeypatch.delenv(name)
        for name, value in {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": "0",
        }.items():
            monkeypatch.setenv(name, value)
        yield served


def command(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "offbeat", "stage", *map(str, args)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def contents(directory: Path) -> dict[str, bytes]:
    """Files outside of the client's own folder."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and ".cache" not in path.parts
    }


class Clock:
    """Time that passes only while somebody waits for a download."""

    def __init__(self) -> None:
        self.s = 0.0

    def now_s(self) -> float:
        return self.s


class FakeDownload:
    """A download that moves a byte at some moments, and ends at one."""

    def __init__(self, clock: Clock, moves_at_s: Sequence[float] = (), ends_s: float = 1e9) -> None:
        self._clock, self._moves, self._ends_s = clock, moves_at_s, ends_s
        self.missing = ("1.safetensors", "2.safetensors")
        self.is_killed = False

    def ended(self, within_s: float) -> bool:
        self._clock.s += within_s
        return self._clock.s >= self._ends_s

    def kill(self) -> None:
        self.is_killed = True

    def raise_problem(self) -> None:
        pass

    def look(self) -> DownloadProgress:
        moved = sum(at <= self._clock.s for at in self._moves)
        return DownloadProgress(self.missing, moved, 99, frozenset({("1", moved, moved)}))


def lines(clock: Clock, *downloads: FakeDownload) -> Iterator[str]:
    waiting, current = list(downloads), [downloads[0]]

    def start() -> FakeDownload:
        current[0] = waiting.pop(0)
        return current[0]

    def look() -> DownloadProgress:
        return current[0].look()

    return supervise(start, look, "/local/m", LIMIT_S, clock.now_s)


def test_a_download_that_stands_still_is_killed_and_continued_and_named_with_file_and_bytes() -> (
    None
):
    clock = Clock()
    still = FakeDownload(clock, moves_at_s=[5, 10])
    said = list(lines(clock, still, FakeDownload(clock, ends_s=60)))
    assert still.is_killed
    assert (
        "no byte moved for 30 s: without 1.safetensors and 1 more, 2 of 99 bytes. "
        "Killed the download"
    ) in said
    assert clock.s == pytest.approx(60)


def test_a_download_that_is_slow_has_all_the_time_that_it_needs() -> None:
    clock = Clock()
    slow = FakeDownload(clock, moves_at_s=range(0, 3600, 29), ends_s=3600)
    said = list(lines(clock, slow))
    assert not slow.is_killed
    assert said[0] == "without 1.safetensors and 1 more, 1 of 99 bytes"


def test_a_download_is_killed_if_nobody_supervises_it_any_more() -> None:
    clock = Clock()
    download = FakeDownload(clock, moves_at_s=range(0, 3600, 29))
    said = supervise(lambda: download, download.look, "/local/m", LIMIT_S, clock.now_s)
    next(said)
    said.close()
    assert download.is_killed


def test_a_download_is_killed_if_its_directory_cannot_be_read() -> None:
    class BrokenDisk(FakeDownload):
        def look(self) -> DownloadProgress:
            if self._clock.s:
                raise OSError("the disk is gone")
            return super().look()

    clock = Clock()
    download = BrokenDisk(clock)
    with pytest.raises(OSError, match="the disk is gone"):
        list(lines(clock, download))
    assert download.is_killed


def test_a_download_that_stalls_three_times_without_a_new_file_is_given_up() -> None:
    clock = Clock()
    with pytest.raises(CannotStage, match="/local/m: no byte moved for 30 s, 3 times: without 1"):
        list(lines(clock, *(FakeDownload(clock) for _ in range(3))))
    assert clock.s == pytest.approx(3 * LIMIT_S)


def test_a_new_file_between_two_stalls_grants_three_more_downloads() -> None:
    class OneMoreFile(FakeDownload):
        def look(self) -> DownloadProgress:
            if self._clock.s % LIMIT_S:
                self.missing = ("2.safetensors",)
            return super().look()

    clock = Clock()
    third, last = OneMoreFile(clock), FakeDownload(clock, ends_s=6 * LIMIT_S)
    plain = [FakeDownload(clock) for _ in range(4)]
    list(lines(clock, *plain[:2], third, *plain[2:], last))
    assert third.is_killed


@pytest.mark.parametrize("held", ["1.safetensors", "additional_chat_templates/tools.jinja"])
def test_a_download_killed_anywhere_shows_only_whole_files_and_the_next_continues(
    hub: FakeHub, tmp_path: Path, held: str
) -> None:
    target = tmp_path / "node/model"
    target.mkdir(parents=True)
    snapshot = HubSnapshot(DATASET, hub.first, {name: len(each) for name, each in FILES.items()})
    hub.held_file = held
    child = ChildDownload(snapshot, target)
    hub.is_held.wait()
    child.kill()
    assert child.ended(0)
    left = contents(target)
    assert left.items() < FILES.items()
    assert not list(target.rglob("*.incomplete"))
    assert held in progress(snapshot, target).missing

    hub.held_file = ""
    again = ChildDownload(snapshot, target)
    assert again.ended(60)
    again.raise_problem()
    assert contents(target) == FILES


def test_a_download_that_stands_still_does_not_keep_the_process_that_gave_it_up(
    hub: FakeHub, tmp_path: Path
) -> None:
    hub.held_file = "2.safetensors"
    done = command(DATASET, "--to", tmp_path / "m", "--stall-timeout", "1")
    assert done.returncode == FAILED
    assert "no byte moved for 1 s, 3 times: without " in done.stderr
    assert "2.safetensors" not in contents(tmp_path / "m")


def test_a_model_is_staged_at_one_commit_without_pickles_and_a_damaged_file_again(
    hub: FakeHub, tmp_path: Path
) -> None:
    target = tmp_path / "m"
    first = command(DATASET, "--to", target)
    assert first.returncode == FINISHED, first.stderr
    assert hub.first in first.stdout
    assert first.stdout.endswith(f"model.path={target}\n")
    assert contents(target) == FILES
    assert not any("pytorch_model.bin" in path or "original" in path for path in hub.requests)

    shard = target / "1.safetensors"
    written_ns = shard.stat().st_mtime_ns
    shard.write_bytes(b"FIRST shard")
    os.utime(shard, ns=(written_ns, written_ns))  # a later file would be downloaded again at once
    hub.requests.clear()
    damaged = command(DATASET, "--to", target)
    assert not any("resolve" in path for path in hub.requests)
    assert damaged.returncode == FAILED
    assert "1.safetensors differed from the checksum of the hub and was removed" in damaged.stderr
    assert command(DATASET, "--to", target).returncode == FINISHED
    assert contents(target) == FILES

    (target / "3.safetensors").write_bytes(b"of another model")
    mixed = command(DATASET, "--to", target)
    assert mixed.returncode == FAILED
    assert "it also holds files of another model: 3.safetensors" in mixed.stderr


def test_models_that_are_missing_or_pickles_are_refused(hub: FakeHub) -> None:
    for name, problem in (
        ("owner/none", "the hub has no model owner/none, or it is private"),
        (
            "owner/sums@v9",
            "model owner/sums has no revision 'v9'. Name a branch, a tag or a commit",
        ),
        (f"owner/sums@{hub.second}", "its weights are not *.safetensors, and pickles run code"),
    ):
        done = command(name, "--to", "/local/m")
        assert done.returncode == REFUSED
        assert problem in done.stderr


def test_a_download_that_fails_says_why(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    snapshot = HubSnapshot(DATASET, hub.first, {"config.json": 2})
    with pytest.raises(CannotStage, match="failed with code 1: owner/sums: the hub cannot be"):
        list(stage_model(snapshot, tmp_path / "m", LIMIT_S))


def test_a_directory_that_two_nodes_share_is_refused_to_the_second(tmp_path: Path) -> None:
    snapshot = HubSnapshot(DATASET, "0" * 40, {})
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(CannotStage, match="another process is staging into it"):
        next(stage_model(snapshot, tmp_path, LIMIT_S))
    os.close(held)


def test_only_files_that_a_run_may_read_are_wanted() -> None:
    names = ["config.json", "a.safetensors", "chat_template.jinja", "old.bin", ".gitattributes"]
    names += ["additional_chat_templates/tools.jinja", "original/a.safetensors", "tokenizer.json"]
    assert [name for name in names if not is_wanted(name)] == [
        "old.bin",
        ".gitattributes",
        "original/a.safetensors",
    ]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("owner/name", ("owner/name", None)),
        ("hf://owner/name@refs%2Fpr%2F1", ("owner/name", "refs/pr/1")),
        ("owner/name@main", ("owner/name", "main")),
        ("name", None),
        ("/a/model", None),
        ("hf://datasets/owner/name", None),
    ],
)
def test_a_model_of_the_hub_is_named_by_owner_and_name(
    text: str, named: tuple[str, str | None] | None
) -> None:
    assert hub_model(text) == named
