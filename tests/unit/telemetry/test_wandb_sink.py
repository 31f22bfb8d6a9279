"""Runs of the real wandb, offline or against a port where nobody listens."""

import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from offbeat.config.run import WandbConfig
from offbeat.telemetry.hub import Telemetry
from offbeat.telemetry.jsonl_sink import JsonlSink
from offbeat.telemetry.records import Record, read_metrics
from offbeat.telemetry.sinks import SinkUnusable
from offbeat.telemetry.wandb_sink import Mode, WandbSink, resolved_mode

_HEADER = 7  # of the file, and of each fragment of a record
_BLOCK = 32 * 1024
_FULL, _LAST = 1, 4


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


def history(run_dir: Path) -> list[tuple[int, dict[str, Any]]]:
    """Step and values of each row that was logged to W&B, ours only."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    (path,) = run_dir.glob("wandb/offline-run-*/*.wandb")
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


def sink(run_dir: Path, mode: Mode) -> WandbSink:
    return WandbSink(
        WandbConfig(project="offbeat-test"),
        mode=mode,
        run_id="run-1",
        run_name="quick",
        run_dir=run_dir,
        recipe={"seed": 1},
        connect_timeout_s=2.0,
    )


def test_auto_is_online_with_a_key_and_offline_without() -> None:
    assert resolved_mode(WandbConfig(), {"WANDB_API_KEY": "k"}) == "online"
    assert resolved_mode(WandbConfig(), {}) == "offline"
    assert resolved_mode(WandbConfig(mode="disabled"), {"WANDB_API_KEY": "k"}) == "disabled"


def test_an_offline_run_holds_the_keys_and_steps_of_metrics_jsonl(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    telemetry = Telemetry([JsonlSink(tmp_path / "metrics.jsonl"), sink(tmp_path, "offline")])
    telemetry.start()
    for step in range(1, 31):
        telemetry.emit(step, step, {"train/reward": step / 8, "time/step_s": 0.25})
    telemetry.emit(31, 31, {"train/reward": 4.0})
    tallies = telemetry.close(60)
    assert [tally.written for tally in tallies] == [31, 31]
    truth = [(each.version, each.metrics) for each in read_metrics(tmp_path / "metrics.jsonl")]
    assert history(tmp_path) == truth


def test_a_missing_wandb_is_named_with_its_extra(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "sys.modules['wandb'] = None\n"  # as if it were not installed
        "from pathlib import Path\n"
        "from offbeat.config.run import WandbConfig\n"
        "from offbeat.telemetry.sinks import SinkUnusable\n"
        "from offbeat.telemetry.wandb_sink import WandbSink\n"
        "sink = WandbSink(WandbConfig(), mode='offline', run_id='r', run_name='n',"
        " run_dir=Path(sys.argv[1]), recipe={})\n"
        "try: sink.open()\n"
        "except SinkUnusable as error: print(error)\n"
        "sink.close()"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "pip install 'offbeat[wandb]'" in finished.stdout


def test_a_disabled_sink_is_unusable_without_an_import(tmp_path: Path) -> None:
    with pytest.raises(SinkUnusable, match="disabled"):
        sink(tmp_path, "disabled").open()


def test_an_unreachable_server_costs_no_record_and_ends_in_one_line_that_says_how_to_sync(
    tmp_path: Path,
) -> None:
    pytest.importorskip("wandb")
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from structlog.testing import capture_logs\n"
        "from offbeat.config.run import WandbConfig\n"
        "from offbeat.telemetry.hub import Telemetry\n"
        "from offbeat.telemetry.wandb_sink import WandbSink\n"
        "sink = WandbSink(WandbConfig(), mode='online', run_id='r', run_name='n',"
        " run_dir=Path(sys.argv[1]), recipe={}, connect_timeout_s=1)\n"
        "telemetry = Telemetry([sink])\n"
        "with capture_logs() as logs:\n"
        "    telemetry.start()\n"
        "    for step in range(1, 6): telemetry.emit(step, step, {'train/reward': 1.0 * step})\n"
        "    (tally,) = telemetry.close(60)\n"
        "(log,) = logs\n"
        "assert tally.written == 5, tally\n"
        "print(log['event'], log['sync_with'])"
    )
    environ = {
        "WANDB_API_KEY": "0" * 40,
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "HOME": str(tmp_path),
    }
    finished = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=environ,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("wandb.kept_offline wandb sync ")
    assert finished.stderr == ""
    assert [step for step, _ in history(tmp_path)] == [1, 2, 3, 4, 5]
