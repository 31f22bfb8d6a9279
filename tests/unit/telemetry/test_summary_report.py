import io
import json
import math
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from offbeat.run_files.disk import Disk
from offbeat.telemetry.applied_steps import WINDOW_STEPS, AppliedStepHistory
from offbeat.telemetry.charts import bar, sparkline
from offbeat.telemetry.report import render_summary, whole_percents
from offbeat.telemetry.summary import GroupCounts, Summary, Syncs, write_atomically
from offbeat.telemetry.time_accounting import GeneratorTime, TrainerTime

SUMMARY = Summary(
    run_id="run-1",
    name="quickstart",
    outcome="finished",
    steps=600,
    trainer_version=600,
    groups=GroupCounts(
        drawn=9612, trained=9600, in_flight=8, dropped={"reward_raised": 3, "evicted": 1}
    ),
    reward_first=0.113,
    reward_last=0.974,
    staleness_histogram={0: 250, 1: 500, 2: 250},
    max_staleness_trained=2,
    wall_s=187.4,
    first_step_s=9.25,
    samples_per_s=819.2,
    tokens_per_s=7373.0,
    trainer_busy_fraction=0.5,
    generator_busy_fraction=0.8,
    trainer_waits={"waiting_groups": 0.333, "waiting_weights": 0.167},
    generator_waits={"waiting_gate": 0.15, "sync": 0.05},
    verdict="trainer",
    syncs=Syncs(count=600, pause_s=0.0113, transfer_s=0.0402, nbytes=1_285_120),
    restarts=1,
    versions={"offbeat": "0.1.0"},
)


def rendered(summary: Summary, width: int = 100, **paths: Path) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render_summary(summary, paths))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_run_without_rewards_shows_its_loss_instead() -> None:
    text = rendered(
        msgspec.structs.replace(SUMMARY, reward_first=None, reward_last=None, loss=0.125)
    )
    assert "0.125" in text and "reward" not in text.split("steps")[0]


def test_a_summary_reads_back_as_it_was_written(tmp_path: Path) -> None:
    SUMMARY.write(tmp_path / "summary.json")
    assert Summary.from_json((tmp_path / "summary.json").read_bytes()) == SUMMARY


def test_the_summary_has_the_fields_scripts_rely_on() -> None:
    fields = json.loads(SUMMARY.to_json())
    assert fields["groups"]["dropped"] == {"evicted": 1, "reward_raised": 3}
    assert fields["staleness_histogram"] == {"0": 250, "1": 500, "2": 250}
    assert fields["error"] is None
    wanted = (
        "steps trainer_version reward_first reward_last max_staleness_trained wall_s name run_id "
        "trainer_busy_fraction generator_busy_fraction outcome first_step_s samples_per_s "
        "tokens_per_s trainer_waits generator_waits restarts weights_digest versions"
    )
    assert set(wanted.split()) <= fields.keys()


def test_a_reward_that_is_not_finite_leaves_valid_json() -> None:
    summary = Summary(run_id="r", name="n", outcome="failed", error="NaN", steps=1, wall_s=1.0,
                      trainer_version=1, groups=GroupCounts(), reward_last=math.nan)  # fmt: skip
    assert json.loads(summary.to_json(), parse_constant=pytest.fail)["reward_last"] is None


def test_a_summary_that_cannot_be_written_leaves_the_old_one_and_no_litter(tmp_path: Path) -> None:
    (tmp_path / "summary.json").mkdir()
    (tmp_path / "summary.json" / "inside").touch()
    with pytest.raises(OSError, match=r"summary\.json"):
        write_atomically(tmp_path / "summary.json", b"{}")
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_writing_again_replaces_the_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a.json", b"old, and longer")
    write_atomically(tmp_path / "a.json", b"new")
    assert (tmp_path / "a.json").read_bytes() == b"new"


def test_a_link_in_a_run_directory_is_never_written_through(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "run" / "report.html"
    victim.write_bytes(b"of the reader")
    path.parent.mkdir()
    guessable = (path.name, f".{path.name}.{os.getpid()}", f"{path.name}.tmp")
    for name in guessable:
        (path.parent / name).symlink_to(victim)
    write_atomically(path, b"a page")
    Disk().write(path.parent / guessable[1], b"a page")
    assert victim.read_bytes() == b"of the reader"
    assert path.read_bytes() == b"a page"
    assert not path.is_symlink()
    assert (path.parent / guessable[2]).is_symlink()


def test_the_report_says_what_was_learnt_how_fast_and_who_waited() -> None:
    text = rendered(SUMMARY, metrics=Path("runs/quickstart/metrics.jsonl"))
    for part in (
        "finished", "0.113 -> 0.974", "600 in 3 min 07 s", "first after 9.2 s", "819 samples/s",
        "7,373 tokens/s", "bottleneck  trainer", "evicted 1, reward_raised 3", "50.0%", "trainer waiting for groups",
        " 33 %", "generators busy",
        "11.3 ms paused", "40.2 ms in transfer, 1.3 MB; medians of 600 syncs", "80 %", "runs/quickstart/metrics.jsonl",
    ):  # fmt: skip
        assert part in text


def test_samples_with_a_refused_request_are_counted_if_there_are_any() -> None:
    assert "refused" not in rendered(SUMMARY)
    text = rendered(msgspec.structs.replace(SUMMARY, refused_samples=12))
    assert "refused     12 samples" in text and "see agent.request_refused in logs/" in text


def test_a_run_without_any_signal_says_so_and_names_the_preview() -> None:
    learned_nothing = msgspec.structs.replace(SUMMARY, steps_with_signal=0)
    console = Console(file=io.StringIO(), width=400)
    console.print(render_summary(learned_nothing, preview="offbeat preview runs/mine/config.yaml"))
    assert isinstance(console.file, io.StringIO)
    rule = "No step had a signal: in each group all rewards were equal, so nothing was learned."
    assert rule in console.file.getvalue()
    assert "rewards: offbeat preview runs/mine/config.yaml" in console.file.getvalue()


def test_a_run_with_few_steps_with_a_signal_says_how_many() -> None:
    few, enough = (msgspec.structs.replace(SUMMARY, steps_with_signal=n) for n in (20, 300))
    assert "Only 20 of 600 steps had a signal" in " ".join(rendered(few).split())
    assert "signal" not in rendered(enough) + rendered(SUMMARY)


def test_every_kind_of_time_has_a_label_for_people() -> None:
    waits = dict.fromkeys(set(TrainerTime) - {TrainerTime.COMPUTE}, 0.1)
    idle = dict.fromkeys(set(GeneratorTime) - {GeneratorTime.COMPUTE}, 0.1)
    text = rendered(msgspec.structs.replace(SUMMARY, trainer_waits=waits, generator_waits=idle))
    assert "generators waiting for the trainer" in text and "trainer sending data" in text
    assert "gate" not in text and "calls " not in text.replace("between calls ", "")


def test_a_resumed_run_claims_nothing_of_the_steps_before() -> None:
    resumed = msgspec.structs.replace(SUMMARY, steps_with_signal=0, controller_incarnations=2)
    assert "signal" not in rendered(resumed)


def test_whatever_was_replaced_is_counted_with_what_it_was() -> None:
    replaced = msgspec.structs.replace(
        SUMMARY, restarts=2, controller_incarnations=4, resumes=1, rewinds=2
    )
    rows = [" ".join(line.split()) for line in rendered(replaced).splitlines()]
    assert "restarts 4 2 of engines, 2 of the controller" in rows
    assert "resumed once" in rows
    assert any(
        row.startswith("rewound 2 times the trainer went back: offbeat report") for row in rows
    )


def test_evaluations_that_failed_are_told_with_the_reason_of_the_last() -> None:
    failed = msgspec.structs.replace(
        SUMMARY, evaluations_failed=3, evaluation_failure="version 9 could not be scored: too long"
    )
    assert "evaluations" in rendered(failed) and "3 failed" in rendered(failed)
    assert "version 9 could not be scored: too long" in rendered(failed)
    assert "evaluations" not in rendered(SUMMARY)


def test_a_run_that_took_fewer_steps_than_asked_says_so() -> None:
    assert "600 of 1000 in 3 min" in rendered(msgspec.structs.replace(SUMMARY, steps_asked=1000))


def test_a_run_that_a_limit_ended_names_the_limit_under_its_outcome() -> None:
    limit = "supervision.wall_clock_limit_s=60"
    ended = msgspec.structs.replace(SUMMARY, steps_asked=1000, ended_by=limit)
    assert f"ended by {limit} after 600 of 1000 steps" in " ".join(rendered(ended).split())
    assert "ended by" not in rendered(SUMMARY)


def test_the_rewards_of_a_short_run_are_means_over_its_halves() -> None:
    text = rendered(msgspec.structs.replace(SUMMARY, steps=8))
    assert "0.113 -> 0.974" in text and "first and last steps, means over 4" in text


def test_one_step_has_one_reward() -> None:
    text = rendered(msgspec.structs.replace(SUMMARY, steps=1))
    assert "0.974" in text and "->" not in text


def test_a_run_that_failed_before_its_first_step_has_a_report_too() -> None:
    summary = Summary(run_id="r", name="n", outcome="failed", error="RunFailed: no room",
                      steps=0, trainer_version=0, groups=GroupCounts(), wall_s=4000.0)  # fmt: skip
    text = rendered(summary)
    assert "RunFailed: no room" in text
    assert "- -> -" in text
    assert "1 h 06 min" in text


def test_text_of_the_run_is_never_taken_for_markup() -> None:
    summary = Summary(run_id="r", name="n", outcome="failed", error="bad [/red] key", steps=0,
                      trainer_version=0, groups=GroupCounts(dropped={"[/bold]": 1}), wall_s=1.0)  # fmt: skip
    text = rendered(summary, path=Path("runs/[/x]"))
    assert "bad [/red] key" in text
    assert "[/bold] 1" in text


@given(st.lists(st.integers(0, 1000), min_size=1).filter(any))
def test_percents_of_a_whole_sum_to_a_hundred(parts: list[int]) -> None:
    shares = {str(i): part / sum(parts) for i, part in enumerate(parts)}
    percents = whole_percents(shares)
    assert sum(percents.values()) == 100
    assert all(abs(percents[name] - shares[name] * 100) < 1 + 1e-6 for name in shares)


@given(st.lists(st.floats(-10, 10), max_size=60))
def test_windows_are_the_first_and_last_steps(rewards: list[float]) -> None:
    steps = AppliedStepHistory()
    for reward in rewards:
        steps.add(reward, [(0, 2)])
    if not rewards:
        assert (steps.mean_first(0), steps.mean_last(0), steps.recent) == (None, None, ())
        return
    window = min(WINDOW_STEPS, max(1, len(rewards) // 2))
    first, last, recent = rewards[:window], rewards[-window:], rewards[-WINDOW_STEPS:]
    assert steps.mean_first(len(rewards)) == pytest.approx(sum(first) / window)
    assert steps.mean_last(len(rewards)) == pytest.approx(sum(last) / window)
    assert steps.last == pytest.approx(sum(recent) / len(recent))
    assert steps.recent == tuple(recent)
    assert steps.staleness == {0: 2 * len(rewards)}


def test_a_step_that_a_rewind_undid_counts_once_when_it_is_trained_again() -> None:
    steps = AppliedStepHistory()
    for reward in (1.0, 2.0, 3.0, 4.0):
        steps.add(reward, [(1, 8)])
    for _ in range(3):
        steps.take_back([(1, 8)])
    steps.cut(1, [1.0])
    steps.add(20.0, [(0, 8)])
    assert steps.recent == (1.0, 20.0)
    assert steps.staleness == {0: 8, 1: 8}
    steps.take_back([(1, 8)])
    assert steps.staleness == {0: 8}, "no entry for nothing"


def test_a_sparkline_goes_from_the_lowest_to_the_highest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3, 3]) == "▅▅"
    assert sparkline([0, math.nan, 1, math.inf]) == "▁ █ "
    assert sparkline([math.nan]) == " "


@given(st.floats(-1, 2), st.integers(1, 40))
def test_a_bar_has_its_width(fraction: float, width: int) -> None:
    assert len(bar(fraction, width)) == width


def test_a_bar_is_filled_to_its_share() -> None:
    assert bar(0.5, 4) == "██  "
    assert bar(1, 2) == "██"
    assert bar(1 / 16, 1) == " "
    assert bar(0.2, 4) == "▊   "


class ListingDisk(Disk):
    """Notes what is synced, and under which name a file becomes visible."""

    def __init__(self) -> None:
        self.calls = list[str]()

    def sync(self, path: Path) -> None:
        self.calls.append(f"sync {'directory' if path.is_dir() else 'file'}")
        super().sync(path)

    def rename(self, old: Path, new: Path) -> None:
        self.calls.append(f"rename to {new.name}")
        super().rename(old, new)


def test_a_file_is_durable_before_it_replaces_another_and_so_is_its_name(tmp_path: Path) -> None:
    path, disk = tmp_path / "summary.json", ListingDisk()
    path.write_bytes(b"old")
    write_atomically(path, b"new", disk)
    assert disk.calls == ["sync file", "rename to summary.json", "sync directory"]
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]
