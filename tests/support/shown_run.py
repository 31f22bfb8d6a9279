"""A run directory as a real run leaves it, written in a second: what a page is made of.

A reward that rises, two engines, steps that overlap with generation by one version, evaluations,
and on request losses, a rewind, retries, drops and masked samples.
"""

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from msgspec.structs import replace

from offbeat.controller.events import (
    DropReason,
    EngineLost,
    Joined,
    ReturnKind,
    Served,
    Spent,
    TrainerReplaced,
)
from offbeat.fakes.receipts import make_receipt
from offbeat.messages.evaluations import EvaluatedVersion, ScoredSample
from offbeat.messages.failures import Component
from offbeat.messages.groups import Prompt, Receipt, RolloutTask, SampleFailure, SampleStatus
from offbeat.rollouts.log_table import build_table
from offbeat.rollouts.rollout_log import LoggedGroup
from offbeat.telemetry.evaluation_files import EvaluationFiles
from offbeat.telemetry.records import MetricRecord, encode_line
from offbeat.telemetry.status_file import NamedWait, Status, StatusFile
from offbeat.telemetry.summary import Syncs
from tests.support.recorded_runs import RecordedRun

ROOT = Path(__file__).parents[2]
ENGINES = ("generator-0", "generator-1")
SAMPLES = 8
_BEGAN_UNIX_S = 1_790_000_000.0
_DIGITS = "0123456789"


@dataclass
class ShownRun:
    """Writes the run step by step; ``text`` replaces whatever a model, a person or a name says."""

    run_dir: Path
    steps: int
    groups_per_step: int = 8
    seed: int = 0
    name: str = "two-digit-sums"
    text: str = ""
    snapshot_records: int = 1000
    evaluates_at_start: bool = False
    recipe: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.dice = random.Random(self.seed)
        self.now_s = 0.0
        self.version = 0
        self.again = list[int]()  # groups that a rewind gave back
        self.logged = list[Any]()
        self.lines = list[bytes]()
        self.begin(1)

    def begin(self, incarnation: int) -> None:
        """Begin an incarnation of the controller, with a process for each part."""
        self.run = RecordedRun(
            self.run_dir,
            incarnation=incarnation,
            snapshot_records=self.snapshot_records,
            unix_s=lambda: _BEGAN_UNIX_S + self.now_s,
        )
        self.ledger = self.run.ledger
        for engine in ENGINES:
            self.ledger.note(Joined(Component.ENGINE, engine, f"{engine}-a"))
        self.ledger.note(Joined(Component.TRAINER, "trainer", "trainer-a"))
        self.ready = list[int]()
        self.pass_s(1.5)
        self.serve()
        if self.evaluates_at_start and incarnation == 1:
            self.lines.append(encode_line(self._scores(0)))

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds

    def serve(self) -> None:
        """Have every engine serve the trainer's version."""
        self.ledger.released(self.ledger.trainer_version, "d1")
        for engine in ENGINES:
            self.pass_s(0.004)
            self._served(engine)

    def _served(self, engine: str, incarnation: str = "a") -> None:
        version = self.ledger.trainer_version
        event = Served(engine, f"{engine}-{incarnation}", 1, version, "d1")
        self.ledger.apply(event)
        self.ledger.record(event)

    # --- groups ----------------------------------------------------------------------------------

    def roll_out(self, count: int, *, retried: bool = False, masked: bool = False) -> None:
        """Draw groups, have both engines sample them at once, and commit them one by one."""
        out = list[tuple[int, int, int]]()
        for number in range(count):
            index = self.again.pop(0) if self.again else self.ledger.admit(None)
            engine = ENGINES[number % 2]
            if retried and not number:
                self.ledger.dispatch(index, engine, self.ledger.trainer_version)
                self.pass_s(0.01)
                self.ledger.retry(index, ReturnKind.INFRASTRUCTURE, self.text or "engine_lost")
            version = self.ledger.trainer_version
            out.append((index, self.ledger.dispatch(index, engine, version), version))
        for number, (index, attempt, version) in enumerate(out):
            self.pass_s(self.dice.uniform(0.002, 0.008))
            made = self._receipt(index, attempt, version, ENGINES[number % 2])
            if masked and not number:
                made = _with_masked_sample(made)
            self.ledger.commit(made)
            self.ready.append(index)

    def _receipt(self, index: int, attempt: int, version: int, engine: str) -> Receipt:
        dice, skill = self.dice, 1 - 0.8 * 0.97 ** (version * 200 / max(self.steps, 1) + 1)
        a, b = dice.randrange(50), dice.randrange(50)
        right = [dice.random() < skill for _ in range(SAMPLES)]
        answers = [str(a + b if good else dice.randrange(100)) for good in right]
        lengths = [len(answer) + 1 for answer in answers]
        mixed = version > 0 and dice.random() < 0.1
        spans = tuple(
            ((version - 1, 1), (version, length - 1)) if mixed else ((version, length),)
            for length in lengths
        )
        made = make_receipt(
            index,
            attempt,
            spans,
            engine=engine,
            engine_incarnation=f"{engine}-a",
            rewards=tuple(float(good) for good in right),
            prompt_tokens=(6,) * SAMPLES,
            finish_reasons=tuple(self.text or "stop" for _ in right),
            generate_s=dice.uniform(0.02, 0.08),
            reward_s=0.001,
        )
        self._log(made, self.text or f"{a}+{b}=", answers)
        return made

    def _log(self, made: Receipt, prompt: str, answers: list[str]) -> None:
        data = Prompt(made.prompt_index, 0, made.prompt_index, {"prompt": prompt, "answer": prompt})
        task = RolloutTask(data, made.attempt, SAMPLES, made.engine, 0, 60.0)
        # The digits of the tiny model's vocabulary follow its four special tokens.
        ids = [[_DIGITS.index(digit) + 4 for digit in answer] + [1] for answer in answers]
        columns = {
            "prompt_ids": np.array([4, 5], dtype=np.int32),
            "response_ids": np.array([token for each in ids for token in each], dtype=np.int32),
            "response_offsets": np.cumsum([0, *map(len, ids)]).astype(np.int64),
        }
        self.logged.append(LoggedGroup(task, made, columns))

    def drop(self) -> None:
        self.roll_out(1)
        self.ledger.drop(self.ready.pop(), DropReason.FILTERED, self.text or "zero_variance")

    # --- steps -----------------------------------------------------------------------------------

    def step(self, *, recorded: bool = True, **happened: bool) -> None:
        """Train one step on what is ready, while the groups of the next one are sampled."""
        began_s = self.now_s
        count = self.groups_per_step
        if len(self.ready) < count:
            self.roll_out(count - len(self.ready))
        chosen, self.ready = self.ready[:count], self.ready[count:]
        number = self.ledger.trainer_version + 1
        self.run.attempts += 1
        self.ledger.claim(chosen, number, self.run.attempts)
        self.roll_out(count, **happened)
        self.pass_s(self.dice.uniform(0.01, 0.03))
        self.ledger.intend(number, self.run.attempts)
        self.ledger.applied(number, self.run.attempts)
        trained_s = self.now_s
        self.serve()
        step_s, sync_s = self.now_s - began_s, self.now_s - trained_s
        trainer = {"compute": 0.7 * step_s, "waiting_groups": 0.2 * step_s - sync_s, "sync": sync_s}
        trainer["calls"] = 0.1 * step_s
        engines = {"compute": step_s, "waiting_gate": 0.6 * step_s, "sync": 0.4 * step_s}
        self.ledger.note(Spent(trainer, engines, generate_s=0.05, reward_s=0.001, syncs=1))
        if recorded:
            self.lines += map(encode_line, self._metrics(number, step_s, sync_s))

    def _metrics(self, number: int, step_s: float, sync_s: float) -> Iterator[MetricRecord]:
        """Yield the record of a step, and that of an evaluation if one has ended in it."""
        dice, progress = self.dice, number / max(self.steps, 1)
        metrics = {
            "train/reward": 0.2 + 0.7 * progress + dice.uniform(-0.05, 0.05),
            "train/entropy": 2.2 - 1.6 * progress + dice.uniform(-0.1, 0.1),
            "off_policy/behaviour_kl": 0.002 + dice.uniform(-0.001, 0.002),
            "train/zero_variance_groups": min(1.0, progress + dice.uniform(0, 0.1)),
            "train/grad_norm": dice.lognormvariate(0.5, 0.3),
            "train/clip_fraction_low": dice.uniform(0, 0.02),
            "train/clip_fraction_high": dice.uniform(0, 0.01),
            "rollout/response_tokens_mean": 2.8 + dice.uniform(-0.2, 0.2),
            "rollout/truncated_fraction": dice.choice([0.0, 0.0, 0.01]),
            "rollout/masked_fraction": 0.0,
            "off_policy/logprob_gap_mean": 0.02 * (1 - progress) + dice.uniform(0, 0.005),
            "throughput/samples_per_s": self.groups_per_step * SAMPLES / step_s,
            "sync/pause_s": dice.uniform(0.0002, 0.003),
            "sync/transfer_s": sync_s,
            "sync/bytes": 1_285_120.0,
            "time/step_s": step_s,
        }
        for percentile, ratio in ((5, 0.92), (50, 1.0), (95, 1.08)):
            metrics[f"staleness/ratio_p{percentile:02d}_at_1"] = ratio + dice.uniform(-0.02, 0.02)
        if self.text:
            metrics[self.text] = 1.0
        yield MetricRecord(number, number, _BEGAN_UNIX_S + self.now_s, metrics)
        if number % max(1, self.steps // 8) == 0:
            yield self._scores(number)

    def _scores(self, version: int) -> MetricRecord:
        reward = 0.9 * version / max(self.steps, 1) + 0.05
        scores = {"eval/reward": reward, "eval/version": float(version)}
        return MetricRecord(version, version, _BEGAN_UNIX_S + self.now_s, scores)

    def evaluate(self, version: int, right: int) -> None:
        """Write the samples of an evaluation of four prompts, of which the first are right."""
        samples = tuple(
            ScoredSample(
                set="", prompt_index=row, row=row, sample=0, reward=float(row < right),
                is_valid=True, is_correct=row < right, answer=None, finish_reason=self.text or "stop",
                response_tokens=3, turns=1, response=self.text or ("12" if row < right else "7"),
                prompt=json.dumps({"prompt": self.text or f"{row}+{12 - row}=", "answer": 12}),
            )
            for row in range(4)
        )  # fmt: skip
        files = EvaluationFiles(self.run_dir)
        files.take(EvaluatedVersion(version, version, samples))
        files.close()

    def fail_sample(self) -> None:
        """Keep a sample whose reward raised."""
        record = {
            "group": "g-000003", "attempt": 1, "sample": 2, "kind": "environment", "reason": "reward_raised",
            "detail": self.text or "ValueError: no number", "evaluation": False,
            "row": self.text or '{"prompt": "1+1="}', "response": self.text or "I do not know",
            "traceback": self.text or "grader.py, line 3, in reward",
        }  # fmt: skip
        with (self.run_dir / "failures.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    # --- what goes wrong -------------------------------------------------------------------------

    def lose_engine(self) -> None:
        reason = self.text or "generator-1 was lost during state: its process was killed or crashed"
        self.ledger.note(EngineLost("generator-1", reason))
        for _ in range(5):
            self.step(retried=True)
        self.ledger.note(Joined(Component.ENGINE, "generator-1", "generator-1-b"))
        self._served("generator-1", "b")

    def lose_trainer(self, to_version: int) -> None:
        reason = self.text or "trainer rank 0 was lost during microbatch: its process was killed"
        self.ledger.note(TrainerReplaced(reason))
        self.pass_s(0.8)
        self.run.journal.flush_now()
        self.run.rewind(to_version, reason)
        self.ready = sorted(self.ledger.ready)
        self.again = sorted(self.ledger.groups.keys() - set(self.ready))
        self.ledger.note(Joined(Component.TRAINER, "trainer", f"trainer-{self.now_s}"))
        self.serve()

    def lose_controller(self, incarnation: int) -> None:
        self.run.close()
        self.pass_s(1.1)
        self.begin(incarnation)
        self.ready = sorted(self.ledger.ready)

    # --- the end ---------------------------------------------------------------------------------

    def alive(self) -> None:
        """Write what the driver of a living run writes."""
        waits = (
            NamedWait("microbatch 1 of step 41", "the trainer", 0.02, 600.0),
            NamedWait("rollout g-000330", "a worker and generator-0", 3.2, 120.0),
        )
        status = Status(
            step=self.ledger.trainer_version, steps=self.steps, phase="running",
            ready=len(self.ready), in_flight=8, waits=waits, waiting_for="the trainer",
        )  # fmt: skip
        StatusFile(self.run_dir, self.ledger.run_id).update(status)

    def write(self, outcome: str | None = "finished", error: str | None = None) -> Path:
        """Write what stands beside the journal; without an outcome the run goes on."""
        if outcome is not None:
            syncs = Syncs(self.steps, 0.001, 0.008, 1_285_120)
            self.run.summarise(
                outcome=outcome, error=error, name=self.text or self.name, verdict="trainer",
                steps_asked=self.steps, reward_first=0.214, reward_last=0.968, syncs=syncs,
                samples_per_s=2931.0, tokens_per_s=22890.0, trainer_busy_fraction=0.7,
                generator_busy_fraction=0.5, max_staleness_trained=2, wall_s=self.now_s,
            )  # fmt: skip
        self.run.close()
        config = {
            "name": self.text or self.name,
            "steps": self.steps,
            "sampler": {"max_staleness": 2},
            "model": {"path": str(ROOT / "models" / "tiny-addition")},
            **self.recipe,
        }
        (self.run_dir / "config.yaml").write_text(json.dumps(config))
        (self.run_dir / "metrics.jsonl").write_bytes(b"".join(self.lines))
        if self.logged:
            (self.run_dir / "rollouts").mkdir()
            pq.write_table(
                build_table(self.logged), self.run_dir / "rollouts" / "worker-00000.parquet"
            )
        return self.run_dir


def _with_masked_sample(made: Receipt) -> Receipt:
    rest = (SampleStatus.VALID,) * (SAMPLES - 1)
    return replace(
        made,
        statuses=(SampleStatus.MASKED, *rest),
        failures=(SampleFailure.MODEL, *(SampleFailure.NONE,) * (SAMPLES - 1)),
        retries=(1, *(0,) * (SAMPLES - 1)),
    )


def finished(run_dir: Path, steps: int = 60, **changes: Any) -> Path:
    """Write a run that nothing happened to."""
    shown = ShownRun(run_dir, steps, **changes)
    for _ in range(steps):
        shown.step()
    return shown.write()


def with_losses(run_dir: Path, steps: int = 160, **changes: Any) -> Path:
    """Write a run that lost an engine, the trainer and its controller, and finished."""
    shown = ShownRun(run_dir, steps, **changes)
    while shown.ledger.trainer_version < steps:
        version = shown.ledger.trainer_version
        shown.step(masked=version % 7 == 3, retried=version % 31 == 5)
        if version == steps // 4:
            shown.lose_engine()
        elif version == steps // 2 and not shown.ledger.lineage:
            shown.ledger.checkpointed(version - 10, "aa")
            shown.lose_trainer(version - 10)
        elif version == steps * 2 // 3:
            shown.pass_s(1.4)  # frozen: nobody says so
        elif version == steps * 3 // 4:
            shown.drop()
            shown.lose_controller(2)
    shown.evaluate(0, right=1)
    shown.evaluate(steps, right=3)
    return shown.write()


def running(run_dir: Path, steps: int = 40) -> Path:
    """Write a run in its midst, of whose last step the record is torn."""
    shown = ShownRun(run_dir, steps * 2)
    for _ in range(steps):
        shown.step()
    shown.lines.append(b'{"step": 41, "ver')
    shown.alive()
    return shown.write(outcome=None)


def failed(run_dir: Path) -> Path:
    """Write a run that ended with an error."""
    shown = ShownRun(run_dir, 100)
    for _ in range(30):
        shown.step()
    error = "run failed at step 31, trainer version 30: TrainerBudgetSpent: replacements of the trainer: 3 of 3"
    return shown.write("failed", error)


def empty(run_dir: Path) -> Path:
    """Write a run that has begun, and trained nothing."""
    return ShownRun(run_dir, 100).write(outcome=None)


def without_numbers(run_dir: Path) -> Path:
    """Write one step whose metrics are NaN and infinite."""
    shown = ShownRun(run_dir, 1)
    shown.step(recorded=False)
    names = ("train/grad_norm", "off_policy/logprob_gap_mean", "eval/reward", "sync/pause_s")
    values = (float("nan"), float("inf"), float("-inf"), float("nan"))
    record = MetricRecord(1, 1, _BEGAN_UNIX_S, dict(zip(names, values, strict=True)))
    shown.lines.append(encode_line(record))
    return shown.write()


def hostile(run_dir: Path, text: str) -> Path:
    """Write a run whose every text is ``text``."""
    shown = ShownRun(run_dir, 20, text=text, recipe={text: text})
    for step in range(20):
        shown.step(retried=step % 3 == 0)
    shown.lose_engine()
    shown.drop()
    shown.evaluate(0, right=1)
    shown.evaluate(20, right=3)
    shown.fail_sample()
    return shown.write("failed", text)
