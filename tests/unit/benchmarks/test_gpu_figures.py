"""The command of a CUDA machine, its table and its curve, on figures that nobody measured."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.gpu import DEFAULT, PARTS, measure, run_tests
from benchmarks.gpu_curve import draw_curve
from benchmarks.gpu_figures import Figure, Machine, Outcome, append, read, table
from offbeat.telemetry.records import MetricRecord, encode_line

ROOT = Path(__file__).parents[3]
MACHINE = Machine("Fake GPU", 2, "2.13.0", "13.0")


def test_a_table_has_a_row_per_part_and_figure_and_names_the_machine() -> None:
    figures = [
        Figure("pack", 12345.6, "MiB/s", "256 MiB"),
        Figure("pause", 0.01234, "s", "a|b"),
        Figure("steps", 20.0, "steps", "tiny"),
    ]
    outcomes = [Outcome("a", "numbers", "", 12.3), Outcome("c", "curve", "1 failed|x", 3.0)]
    assert table(figures, MACHINE, outcomes).splitlines() == [
        "Machine: 2 x Fake GPU, torch 2.13.0, CUDA 13.0. Command: `make test-gpu`.",
        "",
        "| part | outcome | s |",
        "|---|---|---|",
        "| a: numbers | passed | 12 |",
        r"| c: curve | 1 failed\|x | 3 |",
        "",
        "| figure | value | measured with |",
        "|---|---|---|",
        "| pack | 12,346 MiB/s | 256 MiB |",
        r"| pause | 0.0123 s | a\|b |",
        "| steps | 20 steps | tiny |",
    ]


def test_a_table_without_figures_says_so() -> None:
    assert "| none | | |" in table([], Machine("cpu", 1, "2.13.0", ""), [])


def test_figures_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "figures.jsonl"
    figures = [Figure("a", 1.5, "s", "x"), Figure("b", 2.0, "s", "zwölf")]
    assert read(path) == []
    for figure in figures:
        append(path, figure)
    assert read(path) == figures


def test_every_test_of_a_gpu_belongs_to_one_part() -> None:
    named = [name for part in PARTS for name in part.files]
    found = [path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")]
    assert sorted(named) == sorted(found)
    assert set(DEFAULT) == {part.letter for part in PARTS if "test_gpu_ray.py" not in part.files}


def test_without_a_device_nothing_is_run_and_nothing_fails(tmp_path: Path) -> None:
    said = list[str]()

    def never(command: Sequence[str], limit_s: float, log: Path) -> str:
        raise AssertionError((command, limit_s, log))

    assert measure(tmp_path / "out", None, [], run=never, say=said.append) == 0
    assert "no CUDA device" in said[0]
    assert "nothing was shown" in said[0]
    assert not (tmp_path / "out").exists()


def test_a_part_that_fails_stops_no_other_and_is_named_in_the_table(tmp_path: Path) -> None:
    append(tmp_path / "figures.jsonl", Figure("of another day", 1.0, "s", ""))

    def run(command: Sequence[str], limit_s: float, log: Path) -> str:
        assert command[-2:] == ["--gpu-device", "cuda"]
        assert 0 < limit_s <= 360
        append(Path(command[command.index("--figures") + 1]), Figure(command[3], 3.0, "s", "fake"))
        return "1 failed in 2.0s" if command[3].endswith("megatron.py") else ""

    said = list[str]()
    options = ["--gpu-device", "cuda"]
    assert measure(tmp_path, MACHINE, options, run=run, say=said.append, letters="abg") == 1
    text = (tmp_path / "figures.md").read_text()
    assert "| tests/gpu/test_gpu_nccl.py | 3 s | fake |" in text
    assert "another day" not in text
    assert "| b: a step of megatron-core on one rank | 1 failed in 2.0s | 0 |" in text
    assert "| g: NCCL with one rank | passed | 0 |" in text
    assert text in said


def test_parts_without_time_are_named_and_not_run(tmp_path: Path) -> None:
    def never(command: Sequence[str], limit_s: float, log: Path) -> str:
        raise AssertionError((command, limit_s, log))

    assert measure(tmp_path, MACHINE, [], seconds=1.0, run=never, say=lambda _: None) == 1
    assert (tmp_path / "figures.md").read_text().count("not run: no time was left") == 7


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("pass", ""),
        ("print('1 failed'); raise SystemExit(1)", "1 failed"),
        ("import threading; threading.Event().wait()", "not ended after 1 s"),
    ],
)
def test_a_command_says_what_went_wrong(tmp_path: Path, program: str, problem: str) -> None:
    log = tmp_path / "log.txt"
    log.write_text("of an earlier part\n")
    limit_s = 1.0 if "Event" in program else 60.0
    assert run_tests([sys.executable, "-c", program], limit_s, log) == problem
    assert log.read_text().startswith("of an earlier part")


def test_a_curve_is_drawn_of_the_rewards_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    metrics, picture = tmp_path / "curve.jsonl", tmp_path / "curve.png"
    metrics.write_bytes(b"")
    assert "has no step" in draw_curve(metrics, picture, "cpu")
    records = [
        MetricRecord(n, n, 100.0 + n, {"train/reward": n / 30, "time/step_s": 1.0})
        for n in range(1, 31)
    ]
    metrics.write_bytes(b"".join(map(encode_line, records)))
    assert draw_curve(metrics, picture, "cpu") == ""
    assert picture.read_bytes().startswith(b"\x89PNG")
