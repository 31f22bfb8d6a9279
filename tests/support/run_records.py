"""What a run left on disk, and whether its accounts agree with each other."""

from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from offbeat.controller.events import AnyEvent, Committed, Rewound, StepApplied, StepIntent
from offbeat.controller.journal import read_journal
from offbeat.controller.ledger import Ledger
from offbeat.telemetry.summary import Summary


@dataclass(frozen=True)
class RunRecords:
    """The run directory, read once."""

    summary: Summary
    events: list[AnyEvent]
    trained: list[dict[str, Any]]  # the trainer's own log: step, attempt, prompt indices
    metrics: list[dict[str, Any]]  # a dictionary a step

    @classmethod
    def read(cls, run_dir: Path) -> "RunRecords":
        return cls(
            Summary.from_json((run_dir / "summary.json").read_bytes()),
            list(read_journal(run_dir / "journal")),
            _lines(run_dir / "logs" / "trained-rank0.jsonl"),
            _lines(run_dir / "metrics.jsonl"),
        )

    def agree(self) -> None:
        """Journal, summary and trainer tell the same story, and no group is lost or trained twice.

        A run that was cut off may have one step whose answer came too late for the ledger; they
        know what was to be trained in it.
        """
        groups, ledger = self.summary.groups, Ledger.fold(self.events)
        told = msgspec.structs.asdict(groups)
        assert told.pop("dropped") == dict(ledger.totals.dropped)
        assert told == ledger.counts()
        assert self.summary.trainer_version == ledger.trainer_version

        known = _counted(self.events)
        done = _held(self.trained)
        if self.summary.outcome != "finished" and len(done) == len(known) + 1:
            intents = [event for event in self.events if isinstance(event, StepIntent)]
            known.append((intents[-1].step, sorted(intents[-1].prompt_indices)))
        assert done == known
        trained = Counter(
            chain.from_iterable(prompt_indices for _, prompt_indices in _counted(self.events))
        )
        assert set(trained.values()) <= {1}, "a group was trained twice"
        assert groups.trained == trained.total()
        places = (groups.admitted, groups.in_flight, groups.ready, groups.training)
        assert groups.drawn == groups.trained + sum(places) + sum(groups.dropped.values())

    def no_token_is_from_the_future(self) -> None:
        version = 0
        for event in self.events:
            if isinstance(event, StepApplied):
                version = event.version
            elif isinstance(event, Rewound):
                version = event.to_version
            elif isinstance(event, Committed):
                assert event.receipt.newest_version <= version


def _counted(events: list[AnyEvent]) -> list[tuple[int, list[int]]]:
    """The steps of the lineage that stands, by the journal: step and prompt indices."""
    steps = list[tuple[int, list[int]]]()
    for event in events:
        if isinstance(event, StepApplied):
            steps.append((event.step, sorted(event.prompt_indices)))
        elif isinstance(event, Rewound):
            del steps[event.to_version :]
    return steps


def _held(trained: list[dict[str, Any]]) -> list[tuple[int, list[int]]]:
    """The same by the trainer's own log."""
    steps = list[tuple[int, list[int]]]()
    for line in trained:
        if "restored" in line:
            del steps[line["restored"] :]
        else:
            steps.append((line["step"], sorted(line["prompt_indices"])))
    return steps


def _lines(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def temporary_files(run_dir: Path) -> list[Path]:
    """Files that writing atomically puts beside the real one and that must not stay."""
    hidden = (path for path in run_dir.rglob(".*") if path.is_file())
    return [path for path in hidden if path.name != ".metadata"]  # a checkpoint's table of contents
