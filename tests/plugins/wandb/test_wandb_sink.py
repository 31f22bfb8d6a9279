"""Runs of the real wandb, offline or against a port where nobody listens."""

import importlib.util
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from offbeat.plugins.wandb.section import WandbConfig
from offbeat.plugins.wandb.sink import resolved_mode
from offbeat.telemetry.records import read_metrics

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
            rows.append((record.history.step.num, ours))
    return rows


PREAMBLE = """
import sys
from pathlib import Path

import psutil
from structlog.testing import capture_logs

from offbeat.plugins.wandb.section import WandbConfig
from offbeat.telemetry.hub import Telemetry
from offbeat.telemetry.hub import JsonlSink
from offbeat.telemetry.records import MetricRecord
from offbeat.telemetry.tracker import SinkUnusable
from offbeat.plugins.wandb.sink import WandbSink

run_dir = Path(sys.argv[1])

def sink(mode):
    return WandbSink(
        WandbConfig(project="offbeat-test"), mode=mode, run_id="run-1", run_name="quick",
        run_dir=run_dir, recipe={"seed": 1}, connect_timeout_s=1.0,
    )

def record(step):
    return MetricRecord(step, step, 0.0, {"train/reward": 1.0})
"""


def run(program: str, run_dir: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """wandb changes the process it is used in, so each test gives it one of its own."""
    return subprocess.run(
        [sys.executable, "-c", PREAMBLE + program, str(run_dir)],
        capture_output=True,
        text=True,
        check=False,
        env={"HOME": str(run_dir), **environ},
    )


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
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    records = [pb.Record.FromString(payload) for payload in payloads(path)]
    defined = [each.metric for each in records if each.WhichOneof("record_type") == "metric"]
    assert [(each.glob_name, each.step_metric) for each in defined if each.glob_name] == [
        ("eval/*", "eval/version")
    ]


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
