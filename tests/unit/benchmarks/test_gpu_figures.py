"""The command of a CUDA machine and its table, on figures that nobody measured."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.gpu import measured
from benchmarks.gpu_figures import Figure, Machine, append, read, table

MACHINE = Machine("Fake GPU", 2, "2.13.0", "13.0")


def test_a_table_has_a_row_per_figure_and_names_the_machine() -> None:
    figures = [
        Figure("pack", 12345.6, "MiB/s", "256 MiB"),
        Figure("pause", 0.01234, "s", "a|b"),
        Figure("steps", 20.0, "steps", "tiny"),
    ]
    assert table(figures, MACHINE, failed=False).splitlines() == [
        "Machine: 2 x Fake GPU, torch 2.13.0, CUDA 13.0. Command: `make test-gpu`.",
        "",
        "| figure | value | measured with |",
        "|---|---|---|",
        "| pack | 12,346 MiB/s | 256 MiB |",
        r"| pause | 0.0123 s | a\|b |",
        "| steps | 20 steps | tiny |",
    ]


def test_a_table_of_a_failed_run_says_so() -> None:
    text = table([], Machine("cpu", 1, "2.13.0", ""), failed=True)
    assert text.startswith("Machine: cpu, torch 2.13.0. Command")
    assert "A test failed" in text
    assert "| none | | |" in text


def test_figures_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "figures.jsonl"
    figures = [Figure("a", 1.5, "s", "x"), Figure("b", 2.0, "s", "zwölf")]
    assert read(path) == []
    for figure in figures:
        append(path, figure)
    assert read(path) == figures


def test_without_a_device_nothing_is_run_and_nothing_fails(tmp_path: Path) -> None:
    said = list[str]()

    def never(command: Sequence[str]) -> int:
        raise AssertionError(command)

    assert measured(tmp_path / "out", None, [], run=never, say=said.append) == 0
    assert "no CUDA device" in said[0]
    assert "nothing was shown" in said[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("code", [0, 1])
def test_the_table_is_written_and_the_exit_code_is_that_of_the_tests(
    tmp_path: Path, code: int
) -> None:
    append(tmp_path / "figures.jsonl", Figure("of another day", 1.0, "s", ""))

    def run(command: Sequence[str]) -> int:
        assert "tests/gpu" in command
        assert command[-2:] == ["--gpu-device", "cuda"]
        append(Path(command[command.index("--figures") + 1]), Figure("pack", 3.0, "s", "fake"))
        return code

    said = list[str]()
    options = ["--gpu-device", "cuda"]
    assert measured(tmp_path, MACHINE, options, run=run, say=said.append) == code
    text = (tmp_path / "figures.md").read_text()
    assert "| pack | 3 s | fake |" in text
    assert "another day" not in text
    assert ("A test failed" in text) is bool(code)
    assert text in said
