"""A step is undone on every way out of it; a failure of that hides neither its error nor its update."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.messages.fences import StepKey
from offbeat.trainers.batches.packing import PackedRows
from offbeat.trainers.movement import UpdateResult
from offbeat.trainers.parts import LossOf, Updates
from offbeat.trainers.torch import TorchTrainer
from offbeat.trainers.torch.passes import TorchPasses
from offbeat.trainers.torch.torch_trainer import TorchParts
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.support.chunks import in_chunk
from tests.support.split_steps import Step, run_step

BEGIN, CHUNK, FINISH = (StepKey(1, 1, number) for number in range(3))


class StepFailed(Exception):
    """The error of the step itself."""


class DeviceLost(Exception):
    """The error of undoing it."""


class FailingTrainer(TorchTrainer):
    """Fails where it is told to."""

    fails_in = ""
    cannot_undo = False

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, parts=TorchParts(passes=self.wrap), **named)
        self.updates = FailingUpdates(self, self.updates)

    def wrap(self, passes: TorchPasses, *_: object) -> TorchPasses:
        add = passes.add_gradients

        def fail(microbatches: Sequence[PackedRows], loss_of: LossOf, loss: LossSpec) -> None:
            add(microbatches, loss_of, loss)
            if self.fails_in == "chunk":
                raise StepFailed

        passes.add_gradients = fail
        return passes

    @property
    def is_clean(self) -> bool:
        return all(each.grad is None for each in self.module.parameters())


class FailingUpdates:
    """Fails where its trainer is told to."""

    def __init__(self, trainer: FailingTrainer, updates: Updates) -> None:
        self._trainer, self._updates = trainer, updates

    def begin(self) -> None:
        self._updates.begin()

    def step(self, denominator: float, rate: float) -> UpdateResult:
        if self._trainer.fails_in == "finish":
            raise StepFailed
        return self._updates.step(denominator, rate)

    def drop_gradients(self) -> None:
        if self._trainer.cannot_undo:
            raise DeviceLost
        self._updates.drop_gradients()


def split(trainer: TorchTrainer, step: Step) -> None:
    groups, advantages = step
    trainer.begin_train_step(BEGIN, LossSpec())
    trainer.train_microbatch(CHUNK, build_chunk(groups), advantages)
    trainer.finish_train_step(FINISH)


def whole(trainer: TorchTrainer, step: Step) -> None:
    trainer.train(*in_chunk(step), LossSpec())


@pytest.fixture
def trainer(qwen3: Path) -> FailingTrainer:
    model = ModelConfig(path=str(qwen3), dtype="float32")
    settings = TorchTrainerConfig()
    return FailingTrainer(qwen3, trainer=settings, model=model, total_steps=9, max_model_len=512)


WAYS = pytest.mark.parametrize("run", [split, whole], ids=["split", "whole"])
PLACES = pytest.mark.parametrize("place", ["chunk", "finish"])
Run = Callable[[TorchTrainer, Step], None]


@WAYS
@PLACES
def test_a_step_that_raises_is_undone_and_the_next_one_is_as_if_it_had_not_been(
    trainer: FailingTrainer, step_data: Step, run: Run, place: str
) -> None:
    before, trainer.fails_in = trainer.weights_digest(), place
    with pytest.raises(StepFailed):
        run(trainer, step_data)
    assert trainer.is_clean
    assert trainer.weights_digest() == before
    trainer.fails_in = ""
    trainer.abort_train_step(BEGIN)
    assert run_step(trainer, step_data, LossSpec(), 2, number=2).applied


@WAYS
@PLACES
def test_an_undo_that_fails_too_is_logged_and_the_error_of_the_step_goes_on(
    trainer: FailingTrainer, step_data: Step, run: Run, place: str
) -> None:
    trainer.fails_in, trainer.cannot_undo = place, True
    with capture_logs() as logs, pytest.raises(StepFailed):
        run(trainer, step_data)
    assert {"trainer.undo_failed"} == {each["event"] for each in logs if "error" in each}
    trainer.fails_in, trainer.cannot_undo = "", False
    trainer.abort_train_step(BEGIN)
    assert run_step(trainer, step_data, LossSpec(), 1, number=2).applied


def test_an_update_that_was_applied_counts_though_its_gradients_cannot_be_discarded(
    trainer: FailingTrainer, step_data: Step
) -> None:
    groups, advantages = step_data
    trainer.begin_train_step(BEGIN, LossSpec())
    trainer.train_microbatch(CHUNK, build_chunk(groups), advantages)
    trainer.cannot_undo = True
    result = trainer.finish_train_step(FINISH)
    assert (result.applied, trainer.steps_applied, trainer.last_applied) == (True, 1, FINISH)
    assert trainer.finish_train_step(FINISH) == result
    trainer.cannot_undo = False
    assert run_step(trainer, step_data, LossSpec(), 1, number=2).applied


def test_an_abort_is_idempotent_and_raises_what_it_could_not_undo(
    trainer: FailingTrainer, step_data: Step
) -> None:
    groups, advantages = step_data
    trainer.begin_train_step(BEGIN, LossSpec())
    trainer.train_microbatch(CHUNK, build_chunk(groups), advantages)
    trainer.cannot_undo = True
    with pytest.raises(DeviceLost):
        trainer.abort_train_step(BEGIN)
    trainer.cannot_undo = False
    trainer.abort_train_step(BEGIN)
    trainer.abort_train_step(BEGIN)
    assert run_step(trainer, step_data, LossSpec(), 1, number=2).applied
