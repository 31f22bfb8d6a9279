"""Trains the recorded groups of a run again with the trainer alone, and compares the steps.

The trainer receives the calls of the recorded run: begin, logprobs and microbatch of each chunk,
finish. Its chunks hold the recorded bytes in the recorded order. So each step ends with the
recorded bits, unless a setting, the code, the machine or the record has changed.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import torch

from offbeat.algorithms.custom_advantage import load_estimator
from offbeat.config.base import of_kind
from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.controller.train_step import MinibatchAssigner
from offbeat.environments.inputs import ADVANTAGE, LOSS
from offbeat.launch.initial_model import INITIAL_MODEL, with_initial_model
from offbeat.messages.failures import InitialWeightsChanged
from offbeat.messages.fences import StepKey
from offbeat.messages.groups import Receipt
from offbeat.messages.training import StepResult
from offbeat.plugins.retrain.comparison import (
    Compared,
    Reproduced,
    comparable,
    header,
    metric_difference,
    table_row,
)
from offbeat.plugins.retrain.errors import CannotRetrain, RecordDamaged
from offbeat.plugins.retrain.output import RetrainedFolder, row_of
from offbeat.plugins.retrain.recording import (
    RecordedColumns,
    RecordedStep,
    RecordedSteps,
    read_rows,
    read_steps,
)
from offbeat.plugins.retrain.settings import Settings
from offbeat.rollouts.worker import mask_truncated
from offbeat.runs.inputs import WORKING_DIR, find_shipped_code, read_inputs, targets
from offbeat.telemetry.logs import log_to
from offbeat.telemetry.records import MetricRecord
from offbeat.trainers.checkpoints.manifest import (
    CheckpointCorrupt,
    check_identity,
    read_manifest,
    verify,
)
from offbeat.trainers.checkpoints.rank_store import FOLDER
from offbeat.trainers.ranks.peers import SingleRank
from offbeat.trainers.spec import TrainerSpec
from offbeat.trainers.torch.torch_trainer import TorchTrainer, make_torch_rank
from offbeat.transfer_queue.schema import Columns
from offbeat.weight_sync.manifest import release_digest
from offbeat.weight_sync.transport import ShardSource, WeightSource

_STATE: Final = "state_"


class _Start(NamedTuple):
    """State that a retrained run begins with."""

    version: int
    checkpoint: Path | None  # None: the initial model

    def describe(self, wanted: int) -> str:
        """Return one line about it, for people."""
        nearest = "" if self.version == wanted else f", the newest state at or before {wanted}"
        if self.checkpoint is None:
            return f"starts at the initial model{nearest}"
        return f"starts at {FOLDER}/{self.checkpoint.name}{nearest}"


def find_start(run_dir: Path, wanted: int) -> _Start:
    """Return the newest checkpoint of version ``wanted`` or older, else the initial model."""
    states = (run_dir / FOLDER).glob(f"{_STATE}*")
    names = (each.name.removeprefix(_STATE) for each in states)
    found = [int(name) for name in names if name.isdecimal() and 0 < int(name) <= wanted]
    if not found:
        return _Start(0, None)
    return _Start(max(found), run_dir / FOLDER / f"{_STATE}{max(found)}")


def retrain_run(
    run_dir: Path,
    settings: Settings,
    from_step: int,
    steps: int | None,
    out: Path | None,
    say: Callable[[str], None],
) -> str:
    """Retrain the recorded steps after ``from_step`` and return the first difference, or nothing.

    With settings that differ from the run's, differences are expected, so nothing is returned.

    Args:
        run_dir: Directory of the run. Nothing in it changes.
        settings: The recipe to retrain with.
        from_step: Version to start at, or at the nearest older checkpoint.
        steps: Number of steps to train after ``from_step``. None: all recorded steps.
        out: Directory to write. None: next to the run.
        say: Prints a line.

    Raises:
        CannotRetrain: The run has no such steps, or has not recorded their groups.
        OffbeatError: A file of the run is damaged, or does not fit the run any more.
        OSError: A file cannot be read or written.
    """
    start = find_start(run_dir, from_step)
    last = float("inf") if steps is None else from_step + steps
    recorded = read_steps(run_dir, start.version, last)
    if not recorded.steps:
        problem = f"it has trained {recorded.newest} steps, but none after {start.version}"
        raise CannotRetrain(str(run_dir), problem, "Name an earlier --from")
    columns = RecordedColumns(run_dir)
    columns.check(recorded.steps.values())
    rows = read_rows(run_dir, recorded.steps)
    folder = RetrainedFolder(run_dir, out, settings)
    say(start.describe(from_step))
    reproduced = Reproduced()
    with folder, log_to("retrain", folder.path / "logs"):
        trainer = _Trainer(run_dir, settings, columns, folder.path)
        trainer.load(start, recorded)
        difference = _train(trainer, recorded, rows, settings, folder, reproduced, say)
        folder.finish(start.version, sorted(recorded.steps), reproduced, difference)
    if settings.reproduces and not difference:
        say(str(reproduced))
    say(str(folder.path))
    return difference


def _train(
    trainer: "_Trainer",
    recorded: RecordedSteps,
    rows: Mapping[int, Mapping[str, float]],
    settings: Settings,
    folder: RetrainedFolder,
    reproduced: Reproduced,
    say: Callable[[str], None],
) -> str:
    """Train all steps; return the first difference that should not exist, or nothing."""
    if not settings.reproduces:
        say(header())
    for version in sorted(recorded.steps):
        step, row = recorded.steps[version], rows.get(version, {})
        try:
            result = trainer.train(step)
        except RecordDamaged as damage:
            return str(damage)
        metrics = row_of(row, result)
        folder.write(MetricRecord(step.step, version, time.time(), metrics))
        if not settings.reproduces:
            say(table_row(step.step, row, metrics, result.reason))
            continue
        for compared in trainer.compare(recorded, step, row, result):
            if compared.difference:
                return f"step {step.step}: {compared.what}: {compared.difference}"
            reproduced.add(compared)
    return ""


class _Trainer:
    """The trainer of a run without the rest of the run."""

    def __init__(
        self, run_dir: Path, settings: Settings, columns: RecordedColumns, out: Path
    ) -> None:
        """Load the model like the run did.

        Raises:
            CannotRetrain: The run directory contains its own code.
            OffbeatError: The model, or the user's loss or advantage, cannot be loaded.
        """
        self._run_dir, self._settings, self._columns = run_dir, settings, columns
        initial = run_dir if (run_dir / INITIAL_MODEL).is_dir() else out
        self.config = config = with_initial_model(settings.config, initial)
        inputs = dict(read_inputs(run_dir))
        working_dir = Path(inputs.get(WORKING_DIR, Path.cwd()))
        if problem := find_shipped_code(run_dir, working_dir, config):
            fix = "Read that code first; to trust it, copy it into the working directory of the run"
            raise CannotRetrain(str(run_dir), problem, fix)
        named = targets(config)
        for key in (LOSS, ADVANTAGE):
            if f"{key}" in settings.changed or key not in named:
                inputs.pop(key, None)  # of different code than the run's
        torch.set_num_threads(of_kind(TorchTrainerConfig, config.trainer).threads)
        spec = TrainerSpec(config, str(out), working_dir=str(working_dir), inputs=inputs)
        made: tuple[TorchTrainer, WeightSource] = make_torch_rank(spec, SingleRank())
        self._trainer, self._source = made
        self._loss = LossSpec.of(config)
        self._advantages = load_estimator(config.algorithm, working_dir)
        self._attempts = 0

    def load(self, start: _Start, recorded: RecordedSteps) -> None:
        """Load the state of the start, and compare its weights with the journal.

        Raises:
            InitialWeightsChanged: ``model.path`` holds different weights than the run began with.
            CheckpointCorrupt, CheckpointMismatch: The checkpoint does not fit.
        """
        trainer, wanted = self._trainer, recorded.initial_weights
        if wanted and trainer.initial_digest != wanted:
            raise InitialWeightsChanged(wanted, trainer.initial_digest)
        if start.checkpoint is None:
            return
        manifest = read_manifest(start.checkpoint)
        check_identity(start.checkpoint, manifest, trainer.identity)
        verify(start.checkpoint, manifest.files)
        trainer.load_state(start.checkpoint)
        of_journal = recorded.checkpoints.get(start.version, manifest.weights_digest)
        if not trainer.current_digest() == manifest.weights_digest == of_journal:
            problem = f"its weights have digest {trainer.current_digest()}, not {of_journal}"
            raise CheckpointCorrupt(str(start.checkpoint), problem)

    def train(self, recorded: RecordedStep) -> StepResult:
        """Train one recorded step with the calls of ``offbeat.controller.train_step``.

        Raises:
            RecordDamaged: The columns of a group are damaged.
        """
        trainer, loss = self._trainer, self._loss
        self._attempts += 1
        key = StepKey(recorded.step, self._attempts, 0)
        assigner = MinibatchAssigner(loss.minibatches, self.config.seed, recorded.step)
        trainer.begin_train_step(key, loss)
        for receipts in recorded.chunks:
            groups = list(self._groups(recorded.step, receipts))
            advantages = [self._advantages(each.rewards, each.valid) for each in receipts]
            key = key.next()
            minibatches = assigner.of([each.prompt_index for each in receipts])
            trainer.train_microbatch(key, trainer.make_chunk(groups), advantages, minibatches)
        return trainer.finish_train_step(key.next())

    def _groups(self, step: int, receipts: tuple[Receipt, ...]) -> Iterator[Columns]:
        """Yield the columns of a chunk, with the logprobs that the trainer adds."""
        groups = [self._columns.read(step, each) for each in receipts]
        if self._settings.masks_truncated:
            masked = zip(receipts, groups, strict=True)
            groups = [mask_truncated(receipt, columns)[1] for receipt, columns in masked]
        loss, trainer = self._loss.config, self._trainer
        if not (loss.needs_policy_logprobs or loss.needs_reference_logprobs or loss.teacher_path):
            yield from groups
            return
        written = trainer.prepare_logprobs(
            trainer.make_chunk(groups),
            policy=loss.needs_policy_logprobs,
            reference=loss.needs_reference_logprobs,
            temperature=self._loss.temperature,
            teacher=loss.teacher_path,
        )
        for columns, added in zip(groups, written, strict=True):
            yield {**columns, **added}

    def compare(
        self,
        recorded: RecordedSteps,
        step: RecordedStep,
        row: Mapping[str, float],
        result: StepResult,
    ) -> Iterator[Compared]:
        """Compare a retrained step with everything that the run has recorded of it."""
        if not result.applied:
            yield Compared("the optimizer", f"applied in the run, refused now: {result.reason}")
        if row:
            yield from metric_difference(row, comparable(result))
        if digest := recorded.checkpoints.get(step.version):
            yield Compared.digests("weights of the checkpoint", digest, self._digest())
        digest = recorded.releases.get(step.version)
        if digest and (got := self._release_digest()) is not None:
            yield Compared.digests("weights of the release", digest, got)

    def _digest(self) -> str:
        return self._trainer.current_digest()

    def _release_digest(self) -> str | None:
        """Return the digest of the weights as engines load them.

        None if the run has no engines, or if the digest depends on their layout.
        """
        source = self._source
        if isinstance(source, ShardSource) or not self.config.generator.has_engines:
            return None
        digests = [digest for _, digest in source.chunks()]
        return release_digest(source.manifest, digests)
