"""Runs of the real wandb, offline or against a port where nobody listens."""

import importlib.util
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

import offbeat
from offbeat.plugins.wandb.section import WandbConfig
from offbeat.plugins.wandb.sink import resolved_mode
from offbeat.telemetry.metric_table import METRICS
from offbeat.telemetry.records import read_metrics
from tests.plugins.wandb.logged import logged_table, parquet

_HEADER = 7  # of the file, and of each fragment of a record
_BLOCK = 32 * 1024
_FULL, _LAST = 1, 4

needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="the wandb extra is not installed"
)


def payloads(path: Path) -> Iterator[bytes]:
    """The records of a ``.wandb`` file: LevelDB's log format behind a header of its own."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    offset, record = _HEADER, b""
    while offset < len(data):
        left = _BLOCK - offset % _BLOCK
        if left < _HEADER:  # padding at the end of a block
            offset += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        record += data[offset + _HEADER : offset + _HEADER + length]
        offset += _HEADER + length
        if kind in (_FULL, _LAST):
            yield record
            record = b""


def offline_runs(run_dir: Path) -> list[Path]:
    """Oldest first."""
    return sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))


def history(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Step and values of each row that was logged to W&B, ours only."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    rows = list[tuple[int, dict[str, Any]]]()
    for payload in payloads(path):
        record = pb.Record.FromString(payload)
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or "/".join(item.nested_key): msgspec.json.decode(item.value_json)
                for item in record.history.item
            }
            ours = {name: value for name, value in items.items() if not name.startswith("_")}
            number = record.history.step.num
            assert ours.pop("step", number) == number  # x axis of all but evaluations
            rows.append((number, ours))
    return rows


def records(run_dir: Path, kind: str) -> list[Any]:
    """The records of one kind in the only run of a directory."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    (path,) = offline_runs(run_dir)
    found = [pb.Record.FromString(payload) for payload in payloads(path)]
    return [getattr(each, kind) for each in found if each.WhichOneof("record_type") == kind]


PREAMBLE = """
import sys
from pathlib import Path

import psutil
from structlog.testing import capture_logs

from offbeat.plugins.wandb.section import WandbConfig
from offbeat.telemetry.hub import Telemetry
from offbeat.telemetry.hub import JsonlSink
from offbeat.telemetry.records import MetricRecord
from offbeat.telemetry.tracker import SinkUnusable, TrackedRun
from offbeat.plugins.wandb.sink import WandbSink

run_dir = Path(sys.argv[1])

def sink(mode, working_dir=None, **keys):
    tracked = TrackedRun("run-1", "quick", run_dir, {"seed": 1}, working_dir=working_dir)
    section = WandbConfig(project="offbeat-test", **keys)
    return WandbSink(section, tracked, mode=mode, connect_timeout_s=1.0)

def record(step):
    return MetricRecord(step, step, 0.0, {"train/reward": 1.0})
"""


def run(
    program: str, run_dir: Path, cwd: Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """wandb changes the process it is used in, so each test gives it one of its own."""
    return subprocess.run(
        [sys.executable, "-c", PREAMBLE + program, str(run_dir)],
        capture_output=True,
        text=True,
        check=False,
        env={
            "HOME": str(run_dir),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(Path(offbeat.__file__).parent.parent),
            **environ,
        },
        cwd=cwd,
    )


def commit_in(folder: Path) -> str:
    """Make a checkout with one commit and return it."""
    folder.mkdir()
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "First"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_auto_is_online_with_a_key_and_offline_without() -> None:
    assert resolved_mode(WandbConfig(), {"WANDB_API_KEY": "k"}) == "online"
    assert resolved_mode(WandbConfig(), {}) == "offline"
    assert resolved_mode(WandbConfig(mode="disabled"), {"WANDB_API_KEY": "k"}) == "disabled"


def test_auto_is_what_the_variable_of_wandb_says_and_a_recipe_overrides_it() -> None:
    asked = {"WANDB_MODE": "disabled", "WANDB_API_KEY": "k"}
    assert resolved_mode(WandbConfig(), asked) == "disabled"
    assert resolved_mode(WandbConfig(mode="offline"), asked) == "offline"


@needs_wandb
def test_an_offline_run_holds_the_keys_and_steps_of_metrics_jsonl(tmp_path: Path) -> None:
    program = """
telemetry = Telemetry([JsonlSink(run_dir / "metrics.jsonl"), sink("offline")])
telemetry.start()
for step in range(1, 31):
    telemetry.emit(step, step, {"train/reward": step / 8, "time/step_s": 0.25})
telemetry.emit(31, 31, {"train/reward": 4.0})
print([tally.written for tally in telemetry.close(60)])
"""
    finished = run(program, tmp_path)
    assert (finished.stdout, finished.stderr) == ("[31, 31]\n", "")
    truth = [(each.version, each.metrics) for each in read_metrics(tmp_path / "metrics.jsonl")]
    (path,) = offline_runs(tmp_path)
    assert history(path) == truth


@needs_wandb
def test_an_evaluation_that_ends_steps_later_is_kept_and_its_x_is_the_version_scored(
    tmp_path: Path,
) -> None:
    program = """
wandb_sink = sink("offline")
wandb_sink.open()
for step in range(1, 7):
    wandb_sink.write(record(step))
wandb_sink.write(MetricRecord(4, 4, 0.0, {"eval/version": 4.0, "eval/reward": 0.5}))
wandb_sink.write(record(7))
wandb_sink.close()
"""
    finished = run(program, tmp_path)
    assert finished.stderr == ""
    (path,) = offline_runs(tmp_path)
    rows = history(path)
    assert [step for step, _ in rows] == list(range(1, 8))
    assert rows[5][1] == {"train/reward": 1.0, "eval/version": 4.0, "eval/reward": 0.5}


@needs_wandb
def test_each_group_of_metrics_has_the_step_as_its_x_axis_and_evaluations_their_version(
    tmp_path: Path,
) -> None:
    program = """
wandb_sink = sink("offline")
wandb_sink.open()
wandb_sink.close()
"""
    assert run(program, tmp_path).stderr == ""
    defined = {each.glob_name: each.step_metric for each in records(tmp_path, "metric")}
    assert {f"{name.partition('/')[0]}/*" for name in METRICS} < defined.keys()
    own = {"": "", "eval/*": "eval/version", "samples/*": "samples/step"}
    assert {name: axis for name, axis in defined.items() if axis != "step"} == own


@needs_wandb
def test_a_run_has_its_tags_group_notes_commit_and_the_metrics_of_the_machine(
    tmp_path: Path,
) -> None:
    program = """
keys = {"tags": ["first", "second"], "group": "seeds", "notes": "with a larger batch"}
wandb_sink = sink("offline", working_dir=Path.cwd(), **keys)
wandb_sink.open()
wandb_sink.close()
"""
    checkout = tmp_path / "checkout"
    commit = commit_in(checkout)
    assert run(program, tmp_path, cwd=checkout).stderr == ""
    (written,) = records(tmp_path, "run")
    assert [*written.tags] == ["first", "second"]
    assert (written.run_group, written.notes) == ("seeds", "with a larger batch")
    assert (written.job_type, written.git.commit) == ("train", commit)
    assert not written.git.remote_url
    measured = {item.key for each in records(tmp_path, "stats") for item in each.item}
    assert "memory_percent" in measured
    assert not records(tmp_path, "environment")  # arguments, executable and host


@needs_wandb
def test_a_run_may_have_neither_commit_nor_metrics_of_the_machine(tmp_path: Path) -> None:
    program = """
wandb_sink = sink("offline", working_dir=run_dir, system_metrics=False)
wandb_sink.open()
wandb_sink.close()
"""
    assert run(program, tmp_path).stderr == ""
    (written,) = records(tmp_path, "run")
    assert not written.git.commit
    assert not records(tmp_path, "stats")


SAMPLES = """
from offbeat.telemetry.step_samples import SampleRow, StepSamples, count_in_bins

def step(number, index):
    samples = StepSamples(
        count_in_bins([0.0, 0.0, 1.0]), count_in_bins([3]), (SampleRow(index, 1, 0, 0.5, -0.25),)
    )
    return MetricRecord(number, number, 0.0, {"train/reward": 0.5}, samples)
"""


@needs_wandb
def test_a_run_shows_histograms_and_a_table_of_samples_with_their_text(tmp_path: Path) -> None:
    pq.write_table(logged_table(7, prompt="1+1=", response="2" * 3000), parquet(tmp_path))
    program = f"""{SAMPLES}
wandb_sink = sink("offline", samples_interval=2)
wandb_sink.open()
for number, index in ((1, 7), (2, 8), (3, 7)):
    wandb_sink.write(step(number, index))
wandb_sink.close()
"""
    assert run(program, tmp_path).stderr == ""
    (path,) = offline_runs(tmp_path)
    rows = dict(history(path))
    assert [*rows] == [1, 2, 3]
    assert sum(rows[1]["train/reward_histogram/values"]) == 3
    assert rows[1]["train/reward_histogram/bins"][::32] == [0.0, 1.0]
    assert sum(rows[3]["rollout/response_tokens_histogram/values"]) == 1
    (shown,) = (path.parent / "files" / "media").rglob("*.table.json")
    table = msgspec.json.decode(shown.read_bytes())
    (row,) = (dict(zip(table["columns"], each, strict=True)) for each in table["data"])
    assert len(row.pop("response")) < 2050
    assert row == {
        "step": 1,
        "version": 1,
        "prompt_index": 7,
        "sample": 0,
        "prompt": "1+1=",
        "reward": 0.5,
        "advantage": -0.25,
        "finish_reason": "stop",
    }
    assert not (tmp_path / ".local").exists()  # W&B's copies are in the run directory


@needs_wandb
def test_a_run_without_tables_and_histograms_sends_no_text(tmp_path: Path) -> None:
    pq.write_table(logged_table(7, prompt="1+1=", response="2"), parquet(tmp_path))
    program = f"""{SAMPLES}
wandb_sink = sink("offline", samples_interval=0, histograms=False)
print(wandb_sink.wants_samples)
wandb_sink.open()
wandb_sink.write(step(1, 7))
wandb_sink.close()
"""
    finished = run(program, tmp_path)
    assert (finished.stdout, finished.stderr) == ("False\n", "")
    (path,) = offline_runs(tmp_path)
    assert history(path) == [(1, {"train/reward": 0.5})]
    assert not [*tmp_path.rglob("*.table.json")]


@needs_wandb
def test_damaged_rollout_files_cost_only_the_table(tmp_path: Path) -> None:
    parquet(tmp_path).write_bytes(b"no parquet")
    (tmp_path / "rollouts" / "folder.parquet").mkdir()
    program = f"""{SAMPLES}
wandb_sink = sink("offline")
wandb_sink.open()
wandb_sink.write(step(1, 7))
wandb_sink.close()
"""
    assert run(program, tmp_path).stderr == ""
    (path,) = offline_runs(tmp_path)
    assert [number for number, _ in history(path)] == [1]


@needs_wandb
def test_an_offline_run_calls_nobody(tmp_path: Path) -> None:
    program = """
def heard(event, args):
    if event in ("socket.getaddrinfo", "socket.gethostbyname"):
        print(event, args)
    if event == "socket.connect" and isinstance(args[1], tuple):
        print(event, args)

sys.addaudithook(heard)
wandb_sink = sink("offline")
wandb_sink.open()
wandb_sink.write(record(1))
wandb_sink.close()
"""
    finished = run(program, tmp_path)
    assert (finished.stdout, finished.stderr) == ("", "")
    (path,) = offline_runs(tmp_path)
    assert [step for step, _ in history(path)] == [1]


@needs_wandb
def test_an_exception_after_several_runs_is_printed_once(tmp_path: Path) -> None:
    program = """
for name in ("first", "second"):
    run_dir /= name
    one = sink("offline")
    one.open()
    one.close()
raise ValueError("nobody catches it")
"""
    assert run(program, tmp_path).stderr.count("Traceback") == 1


@needs_wandb
def test_when_the_process_of_wandb_dies_the_run_goes_on_in_another(tmp_path: Path) -> None:
    program = """
wandb_sink = sink("offline")
wandb_sink.open()
(core,) = (each for each in psutil.Process().children() if "wandb-core" in each.name())
core.kill()
core.wait(30)
for step in range(1, 100_000):  # the pipe may take some before it notices
    try:
        wandb_sink.write(record(step))
    except Exception:
        break
else:
    sys.exit("nothing was noticed")
wandb_sink.write(record(100_000))
wandb_sink.close()
"""
    finished = run(program, tmp_path)
    assert finished.returncode == 0, finished.stderr
    rows = [row for path in offline_runs(tmp_path) for row in history(path)]
    assert rows[-1] == (100_000, {"train/reward": 1.0})


@needs_wandb
def test_an_unreachable_server_costs_no_record_and_one_line_says_how_to_sync(
    tmp_path: Path,
) -> None:
    program = """
telemetry = Telemetry([sink("online")])
with capture_logs() as logs:
    telemetry.start()
    for step in range(1, 6):
        telemetry.emit(step, step, {"train/reward": 1.0 * step})
    (tally,) = telemetry.close(60)
(log,) = logs
print(tally.written, log["event"], log["sync_with"])
"""
    finished = run(program, tmp_path, WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9")
    (path,) = offline_runs(tmp_path)
    assert finished.stdout == f"5 wandb.kept_offline wandb sync {path.parent}\n"
    assert finished.stderr == ""
    assert [step for step, _ in history(path)] == [1, 2, 3, 4, 5]


def test_a_missing_wandb_is_named_with_its_extra(tmp_path: Path) -> None:
    program = """
sys.modules["wandb"] = None  # as if it were not installed
try:
    sink("offline").open()
except SinkUnusable as error:
    print(error)
sink("offline").close()
"""
    finished = run(program, tmp_path)
    assert "pip install 'offbeat[wandb]'" in finished.stdout


def test_a_disabled_sink_is_unusable_and_imports_nothing(tmp_path: Path) -> None:
    program = """
try:
    sink("disabled").open()
except SinkUnusable as error:
    print(error, "wandb" in sys.modules)
"""
    finished = run(program, tmp_path)
    assert finished.stdout.endswith("wandb.mode is disabled. Set it to offline or online False\n")
