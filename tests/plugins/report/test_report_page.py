"""`offbeat report`: one file, from the run directory alone, whatever stands in it."""

import base64
import gzip
import hashlib
import io
import itertools
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from offbeat.controller.events import DropReason, ReturnKind
from offbeat.launch.commands.main import app
from offbeat.plugins import report
from offbeat.plugins.report.document import document, run_facts
from offbeat.plugins.report.page import SCRIPTS, page
from offbeat.plugins.report.story import RunStory
from offbeat.plugins.report.timeline import Incident, IncidentKind
from offbeat.plugins.report.verdicts import verdict_of
from offbeat.plugins.watch.run_lines import last_record
from offbeat.run_files.limits import FileTooLarge, read_limited
from offbeat.runs.why import why
from offbeat.telemetry.report import render_summary
from offbeat.telemetry.status_file import NamedWait
from offbeat.telemetry.summary import Summary
from tests.support import shown_run
from tests.support.recorded_runs import RecordedRun

HOSTILE = "</script></title><img src=x onerror=\"document.title='taken'\"><!--\u2028'"


def test_a_name_with_line_ends_makes_one_line_of_the_page() -> None:
    text = page({"runs": [{"name": "a\nssh-ed25519 AAAA evil\r\n", "run_id": "a-1"}]})
    assert "<title>a ssh-ed25519 AAAA evil (a-1) · offbeat</title>" in text


def offbeat(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    times = itertools.count(1_700_000_000)
    return RecordedRun(tmp_path, unix_s=lambda: float(next(times)))


def trained(run: RecordedRun) -> Path:
    """Two steps, a retry and a drop."""
    ledger = run.ledger
    lost = ledger.admit(None)
    ledger.dispatch(lost, "generator-3", 0)
    ledger.retry(lost, ReturnKind.INFRASTRUCTURE, "engine_lost")
    run.rolled_out(lost, 0)
    run.train([lost, *run.ready(1)])
    (filtered,) = run.ready(1)
    ledger.drop(filtered, DropReason.FILTERED, "zero_variance")
    run.train(run.ready(2))
    run.summarise(reward_first=0.5, reward_last=0.5)
    (run.run_dir / "config.yaml").write_text("name: tiny\nsteps: 2\nsampler: {max_staleness: 1}\n")
    run.close()
    return run.run_dir


class Elements(HTMLParser):
    """Every element of a page with its attributes, and the text of its scripts and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found = list[tuple[str, dict[str, str | None]]]()
        self.inside = list[str]()
        self.open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.open = tag
        if tag in {"script", "style"}:
            self.inside.append("")

    def handle_data(self, data: str) -> None:
        if self.open in {"script", "style"}:
            self.inside[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self.open = ""


def test_the_command_writes_one_file_beside_the_run_or_where_it_is_told(run: RecordedRun) -> None:
    run_dir = trained(run)
    told = offbeat("report", run_dir)
    assert told.exit_code == 0, told.output
    assert (run_dir / "report.html").stat().st_size < 200_000
    elsewhere = run_dir / "other.html"
    assert offbeat("report", run_dir, "-o", elsewhere).exit_code == 0
    assert elsewhere.exists()


def test_the_page_loads_nothing_and_its_policy_names_its_script_and_style(run: RecordedRun) -> None:
    text = page(document([trained(run)]))
    elements = Elements(text)
    loading = [each for each in elements.found if {"src", "href", "action", "data"} & set(each[1])]
    assert loading == [("a", {"class": "skip", "href": "#glance"})]
    policy = next(a["content"] for tag, a in elements.found if a.get("http-equiv")) or ""
    style, _, script = elements.inside
    for code, directive in ((script, "script-src"), (style, "style-src")):
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_no_file_of_the_page_builds_html_from_text_or_evaluates_any() -> None:
    web = Path(report.__file__).parent / "web"
    own = [web / name for name in (*SCRIPTS, "runs.js") if not name.startswith("vendor/")]
    assert {path.name for path in web.glob("*.js")} == {path.name for path in own}
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
    )
    assert [path.name for path in own if forbidden.search(path.read_text())] == []


def test_names_that_are_markup_stay_text(run: RecordedRun) -> None:
    run_dir = trained(run)
    (run_dir / "config.yaml").write_text(json.dumps({"name": HOSTILE, HOSTILE: HOSTILE}))
    text = page(document([run_dir]))
    tags = [tag for tag, _ in Elements(text).found]
    assert "img" not in tags
    assert tags.count("script") == 2
    assert HOSTILE not in text


def test_page_summary_and_why_tell_the_same_story(run: RecordedRun) -> None:
    run_dir = trained(run)
    (facts,) = document([run_dir])["runs"]
    summary = Summary.from_json((run_dir / "summary.json").read_bytes())
    assert facts["verdict"]["state"] == summary.outcome
    cards = {card["title"]: card for card in facts["verdict"]["cards"]}
    assert cards["groups"]["note"].startswith("5 drawn = 4 trained + 1 dropped + 0 outstanding")
    assert cards["staleness"]["value"] == "at most 0"
    groups = facts["groups"]["columns"]
    assert groups["step"].tolist() == [1, 1, 0, 2, 2]
    assert groups["attempts"].tolist() == [2, 1, 1, 1, 1]
    assert facts["groups"]["drop_labels"] == ["zero_variance"]
    for prompt_index, example in facts["examples"].items():
        history = why(run_dir, prompt_index)
        assert example["now"] == history.now
        assert [moment[1:] for moment in example["moments"]] == [
            [each.what, each.detail] for each in history.moments
        ]


def test_a_run_that_was_killed_is_told_from_its_journal(run: RecordedRun) -> None:
    run_dir = trained(run)
    written = Summary.from_json((run_dir / "summary.json").read_bytes())
    (run_dir / "summary.json").unlink()
    story = RunStory(run_dir, 0)
    assert story.state == "unfinished"
    assert story.summary.groups == written.groups
    assert story.summary.steps == written.steps
    (facts,) = document([run_dir])["runs"]
    assert dict(facts["summary"])["outcome"] == "unfinished", "nobody has aborted it"


def test_a_run_without_a_step_has_a_page_too(run: RecordedRun) -> None:
    run.close()
    (facts,) = document([run.run_dir])["runs"]
    assert facts["groups"]["count"] == 0
    assert facts["problems"] == [facts["problems"][0]], "there is no config.yaml"
    assert page(document([run.run_dir]))


def test_runs_are_compared_by_keys_curves_and_results(tmp_path: Path) -> None:
    dirs = [tmp_path / "one", tmp_path / "two"]
    for directory in dirs:
        directory.mkdir()
        trained(RecordedRun(directory))
    (dirs[1] / "config.yaml").write_text("name: tiny\nsteps: 3\n")
    first, second = document(dirs)["runs"]
    assert (first["config"]["steps"], second["config"]["steps"]) == ("2", "3")
    assert second["curves"]["train/reward"].tolist() == [0.5, 0.5]
    assert "groups" not in second


def test_damaged_files_beside_the_journal_are_named_and_hide_nothing(run: RecordedRun) -> None:
    run_dir = trained(run)
    (run_dir / "summary.json").write_text("{")
    (run_dir / "config.yaml").write_text("a: [")
    (run_dir / "metrics.jsonl").write_bytes(b"\xff\n{}\n")
    (run_dir / "rollouts").mkdir()
    (run_dir / "rollouts" / "x.parquet").write_bytes(b"PAR1 no PAR1")
    story = RunStory(run_dir, 10)
    assert [problem.split()[0] for problem in story.problems] == [
        "config.yaml", "summary.json", "metrics.jsonl", "1",
    ]  # fmt: skip
    assert story.summary.groups.trained == 4


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", id="what an alias repeats, repeated"
        ),
        pytest.param("a: &a {b: *a}", id="a tree within itself"),
        pytest.param("[" * 5000 + "]" * 5000, id="lists in lists"),
        pytest.param("".join("  " * level + "a:\n" for level in range(500)), id="keys in keys"),
    ],
)
def test_a_recipe_that_stands_for_more_than_its_text_is_not_built(
    run: RecordedRun, config: str
) -> None:
    run_dir = trained(run)
    (run_dir / "config.yaml").write_text(config)
    story = RunStory(run_dir, 10)
    assert [problem.split()[0] for problem in story.problems] == ["config.yaml"]
    assert (story.config, story.summary.groups.trained) == ({}, 4)


def test_a_key_that_is_no_text_and_a_summary_that_is_no_utf8_get_a_page(run: RecordedRun) -> None:
    run_dir = trained(run)
    with (run_dir / "config.yaml").open("a") as recipe:
        recipe.write("1: 2\n0: {3: 4}\n")
    (run_dir / "summary.json").write_bytes(b'{"run_id": "\xff"}')
    (compared,) = document([run_dir])["runs"]
    assert (compared["config"]["1"], compared["config"]["0.3"]) == ("2", "4")
    assert [problem.split()[0] for problem in RunStory(run_dir, 10).problems] == ["summary.json"]


def test_a_pipe_in_place_of_a_file_is_named_and_not_waited_for(run: RecordedRun) -> None:
    run_dir = trained(run)
    files = ("config.yaml", "summary.json", "status.json", "metrics.jsonl", "rollouts/x.parquet")
    (run_dir / "rollouts").mkdir()
    for name in files:
        (run_dir / name).unlink(missing_ok=True)
        os.mkfifo(run_dir / name)
    story = RunStory(run_dir, 10)
    assert [problem.split()[0] for problem in story.problems] == [
        "config.yaml", "summary.json", "status.json", "metrics.jsonl", "1",
    ]  # fmt: skip
    assert last_record(run_dir) is None
    os.mkfifo(run_dir / "journal" / "events-000009.bin")
    refused = offbeat("report", run_dir)
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "events-000009.bin is not a regular file" in refused.stderr


def test_a_journal_that_lost_its_end_is_told_beside_a_summary_that_counts_more(
    tmp_path: Path,
) -> None:
    run_dir = shown_run.finished(tmp_path / "cut", 6)
    assert RunStory(run_dir, 10).problems == []
    [journal] = (run_dir / "journal").glob("events-*.bin")
    os.truncate(journal, journal.stat().st_size // 2)
    [problem] = RunStory(run_dir, 10).problems
    assert re.match(r"the journal ends at step [1-5], and summary.json counts 6: ", problem)


def test_a_file_larger_than_any_that_a_run_writes_is_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"x" * 101)
    assert read_limited(path, 101)
    with pytest.raises(FileTooLarge, match=r"101 bytes; at most 100 are read"):
        read_limited(path, 100)


def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path) -> None:
    told = offbeat("report", tmp_path)
    assert told.exit_code == 2
    assert told.stderr.count("\n") == 1
    assert "it holds no journal" in told.stderr


def test_the_same_run_gives_the_same_data(run: RecordedRun) -> None:
    run_dir = trained(run)

    def data() -> Any:
        text = page(document([run_dir]))
        found = re.search(r'id="data">([^<]+)<', text)
        assert found
        return gzip.decompress(base64.b64decode(found[1]))

    assert re.sub(rb'"made":"[^"]+"', b"", data()) == re.sub(rb'"made":"[^"]+"', b"", data())


def test_a_run_is_alive_while_its_status_file_is_fresh(tmp_path: Path) -> None:
    run_dir = shown_run.running(tmp_path / "run", 2)
    story = RunStory(run_dir, 0)
    assert story.state == "running"
    assert story.status is not None and story.status.status.waits[0].target == "the trainer"
    later_s = story.status.unix_s + 16
    assert RunStory(run_dir, 0, clock=lambda: later_s).state == "unfinished"
    finished = shown_run.finished(tmp_path / "ended", 2)
    (finished / "status.json").write_bytes((run_dir / "status.json").read_bytes())
    assert RunStory(finished, 0).state == "finished", "the summary decides"


def test_a_wait_near_its_deadline_comes_before_any_advice(tmp_path: Path) -> None:
    story = RunStory(shown_run.running(tmp_path / "run", 2), 0)

    def advice(*waits: NamedWait) -> str:
        return verdict_of("running", story.summary, 1, [], waits).advice

    late = NamedWait("probe of generator-1", "generator-1", 70.0, 90.0)
    early = NamedWait("microbatch 1", "the trainer", 3.0, 600.0)
    unlimited = NamedWait("train pump", "ready groups", 400.0, None)
    assert advice(early, late, unlimited) == (
        "probe of generator-1 has waited 1 min 10 s for generator-1, of at most 1 min 30 s."
    )
    assert advice(early, unlimited) == advice()


def test_the_cards_count_failures_and_the_time_of_the_controllers_alone(tmp_path: Path) -> None:
    story = RunStory(shown_run.with_losses(tmp_path / "run", 40), 0)
    summary = msgspec.structs.replace(story.summary, wall_s=119.7)
    verdict = verdict_of("finished", summary, 2, [], counts=story.timeline.counts)
    cards = {each.title: each for each in verdict.cards}
    assert cards["samples trained"].note.endswith("; 2 min 00 s in all")
    assert (cards["incidents"].value, cards["incidents"].note) == (
        "4",
        "engine lost 2, trainer lost 1, controller lost 1; also rewound 1, quiet 1",
    )


def test_page_and_terminal_suggest_the_same_changes(tmp_path: Path) -> None:
    story = RunStory(shown_run.finished(tmp_path / "run", 2), 0)
    recipe: dict[str, object] = {"sync.mode": "keep", "generator.engines": 1}

    def told(bottleneck: str) -> tuple[str, str]:
        summary = msgspec.structs.replace(story.summary, verdict=bottleneck)
        console = Console(file=io.StringIO(), width=200)
        console.print(render_summary(summary, None, recipe))
        assert isinstance(console.file, io.StringIO)
        lines = console.file.getvalue().splitlines()
        (line,) = [each for each in lines if each.startswith("bottleneck")]
        return verdict_of("finished", summary, 1, [], recipe=recipe).advice, line

    advice, line = told("sync")
    assert advice == "Weight syncs take the time: another sync.transport."
    assert line.split() == ["bottleneck", "sync", "another", "sync.transport"]
    advice, line = told("balanced")
    assert advice == "No waiting takes more than 25% of the time."
    assert line.split() == ["bottleneck", "balanced"]


def test_the_advice_names_the_process_that_was_lost_and_is_not_back(tmp_path: Path) -> None:
    story = RunStory(shown_run.running(tmp_path / "run", 2), 0)
    lost = Incident(4.0, 1, IncidentKind.WORKER_LOST, "environment-0", "it was killed")
    rewound = Incident(5.0, 1, IncidentKind.REWOUND, "trainer", "to version 0")

    def advice(*incidents: Incident) -> str:
        return verdict_of("running", story.summary, 1, list(incidents)).advice

    assert (
        advice(lost, rewound)
        == "environment-0 has been down since 4 s into the run: see logs/controller.log."
    )
    assert advice(msgspec.structs.replace(lost, back_s=6.0), rewound) == advice()


@pytest.mark.parametrize(
    ("with_signal", "value", "warns", "advice"),
    [
        (0, "0 of 40", True, "No step had a signal"),
        (2, "2 of 40", True, "Only 2 of 40 steps had a signal"),
        (30, "30 of 40", False, "No waiting takes more"),
    ],
)
def test_the_page_warns_of_a_run_with_few_signals(
    tmp_path: Path, with_signal: int, value: str, warns: bool, advice: str
) -> None:
    story = RunStory(shown_run.finished(tmp_path / "run", 2), 0)
    story.state, story.summary = (
        "finished",
        msgspec.structs.replace(
            story.summary, steps=40, steps_with_signal=with_signal, verdict="balanced"
        ),
    )
    facts = run_facts(story, full=False)
    assert facts["verdict"]["tone"] == ("warn" if warns else "good")
    assert facts["verdict"]["advice"].startswith(advice)
    (card,) = [each for each in facts["verdict"]["cards"] if each["title"] == "signal"]
    assert (card["value"], card["tone"]) == (value, "warn" if warns else "")
    rows = dict(facts["summary"])
    assert rows["steps with signal"] == value
    assert ("warning" in rows) == warns
