"""Scoring held-out prompts while training goes on."""

from collections import Counter
from typing import Any, cast

import msgspec
import pytest

from offbeat.controller.evaluation import PREVIEW_BYTES
from offbeat.controller.events import AnyEvent, StepIntent
from offbeat.controller.ledger import Ledger
from offbeat.fakes.receipts import FakePrompts
from offbeat.messages.groups import Prompt, RolloutTask, SampleStatus
from offbeat.messages.media import Thumbnail
from tests.support.fakes import FakeRollouts
from tests.support.world import World

EVERY_FOURTH = {"eval": {"interval": 4, "prompts": 3}}


class Watched(FakeRollouts):
    """Notes which versions evaluations are sampled from."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scored = list[tuple[int, int | None, int | None]]()
        self.sampled_by = list[str]()

    async def rollout(self, fence: Any, task: RolloutTask) -> Any:
        engine = self.engines[task.engine]
        before = engine.version
        answer = await super().rollout(fence, task)
        if task.evaluation:
            self.sampled_by.append(task.engine)
            self.scored.append((task.prompt_index, before, engine.version))
        return answer


def scores(world: World) -> list[tuple[float, float]]:
    return [
        (record["eval/version"], record["eval/samples"])
        for record in world.telemetry.records
        if "eval/reward" in record
    ]


def test_an_evaluation_is_recorded_under_the_version_that_was_scored() -> None:
    world = World(EVERY_FOURTH, engines=3, scored=FakePrompts())
    watched(world).rollout_s = 4.0  # longer than a step: the trainer goes on meanwhile
    world.run()
    records = [each for each in world.telemetry.records if "eval/version" in each]
    assert [(each["step"], each["version"]) for each in records] == [(4, 4), (8, 8)]
    before = world.telemetry.records[world.telemetry.records.index(records[0]) - 1]
    assert before["version"] > 4
    status = world.built.progress.status()
    assert (status.scores, status.scored_version) == ({"": records[1]["eval/reward"]}, 8)


def watched(world: World) -> Watched:
    rollouts = world.rollouts = Watched(world.generators)
    return rollouts


def test_each_evaluation_is_sampled_from_one_version_only() -> None:
    world = World(EVERY_FOURTH, engines=3, scored=FakePrompts())
    rollouts = watched(world)
    rollouts.rollout_s = 4.0  # longer than a step: the others are synced meanwhile
    world.run()
    world.assert_ledger_agrees()
    assert [version for version, _ in scores(world)] == [4, 8]
    assert all(before == after for _, before, after in rollouts.scored)


def test_without_training_an_evaluation_has_all_engines_and_shares_its_prompts_out() -> None:
    world = World(
        {"eval": {"interval": 4, "prompts": 9}},
        engines=3,
        scored=FakePrompts(),
        evaluates_only=True,
    )
    rollouts = watched(world)
    world.run()
    assert [version for version, _ in scores(world)] == [4, 8]
    assert Counter(rollouts.sampled_by) == dict.fromkeys(world.generators, 6)
    assert all(before == after for _, before, after in rollouts.scored)


@pytest.mark.parametrize(("spares", "least"), [(False, 2), (True, 0)])
def test_a_prompt_may_lose_all_samples_if_the_evaluation_spares_it(
    spares: bool, least: int
) -> None:
    asked = set[int]()

    class Noting(FakeRollouts):
        async def rollout(self, fence: Any, task: RolloutTask) -> Any:
            if task.evaluation:
                asked.add(task.min_valid_samples)
            return await super().rollout(fence, task)

    sections = {"eval": {"interval": 4, "prompts": 3, "samples": 4}}
    world = World(sections, scored=FakePrompts(), spares_prompts=spares)
    world.rollouts = Noting(world.generators)
    world.run()
    assert asked == {least}


def test_no_engine_is_pinned_while_a_newer_release_is_on_its_way_to_it() -> None:
    world = World({"eval": {"interval": 2, "prompts": 3}}, engines=3, scored=FakePrompts())
    rollouts = watched(world)
    rollouts.rollout_s = 3.0
    for generator in world.generators.values():
        generator.load_s = 2.0
    world.run()
    assert len(scores(world)) == 5
    assert all(before == after for _, before, after in rollouts.scored)


def test_with_one_engine_training_waits_for_the_evaluation_and_goes_on() -> None:
    world = World({**EVERY_FOURTH, "sampler": {"name": "ready_first", "max_staleness": 0}},
                  engines=1, scored=FakePrompts())  # fmt: skip
    rollouts = watched(world)
    world.run()
    world.assert_ledger_agrees()
    assert len(scores(world)) == 2
    assert all(before == after for _, before, after in rollouts.scored)
    assert world.generators["generator-0"].version == 10


def test_an_evaluation_that_takes_too_long_is_given_up_and_its_engine_set_free() -> None:
    world = World({"eval": {"interval": 4, "prompts": 3, "deadline_s": 5}}, engines=2,
                  scored=FakePrompts())  # fmt: skip
    rollouts = watched(world)
    rollouts.slow = {1: 500.0}
    world.prompts = FakePrompts()
    world.run()
    assert scores(world) == []
    state = world.built.state
    assert (state.evaluation.failed_count, state.evaluation.failure) == (
        2,
        "eval.deadline_s=5 is over",
    )
    assert len(world.trained) == 40
    assert not any(engine.pinned for engine in world.built.state.fleet.engines.values())
    assert max(engine.version or 0 for engine in world.generators.values()) == 10


def test_fewer_prompts_than_asked_for_are_all_scored() -> None:
    world = World(EVERY_FOURTH, scored=FakePrompts(count=2))
    watched(world)
    world.run()
    assert [samples for _, samples in scores(world)] == [2, 2]


@pytest.mark.parametrize(
    "forged",
    [{"rewards": (1.0, 1.0)}, {"statuses": (SampleStatus.VALID,) * 2}, {"valid_tokens": (9, 9)}],
)
def test_an_evaluation_with_a_receipt_that_no_step_would_take_is_not_reported(
    forged: dict[str, Any],
) -> None:
    world = World(EVERY_FOURTH, engines=3, scored=FakePrompts())

    class Forging(FakeRollouts):
        async def rollout(self, fence: Any, task: RolloutTask) -> Any:
            receipt, columns = await super().rollout(fence, task)
            is_forged = task.evaluation and task.prompt_index == 1
            return msgspec.structs.replace(receipt, **forged if is_forged else {}), columns

    world.rollouts = Forging(world.generators)
    world.run()
    world.assert_ledger_agrees()
    assert len(world.trained) == 40
    assert not scores(world)


class WithPictures(FakeRollouts):
    """Has two small copies of half the room for them in each receipt of an evaluation."""

    async def rollout(self, fence: Any, task: RolloutTask) -> Any:
        receipt, columns = await super().rollout(fence, task)
        small = Thumbnail(1, 1, bytes(PREVIEW_BYTES // 4))
        pictures = (small, small) if task.evaluation else ()
        return msgspec.structs.replace(receipt, previews=pictures), columns


class HoldsPicture(FakePrompts):
    """Rows that hold a picture themselves."""

    def prompt(self, prompt_index: int) -> Prompt | None:
        row = {"prompt": "<image>", "image": {"bytes": "QUJDRA=="}}
        return Prompt(prompt_index, 0, prompt_index, row)


@pytest.mark.plugins
def test_the_first_sample_of_a_prompt_has_its_pictures_as_long_as_the_evaluation_has_room() -> None:
    sections = {"eval": {"interval": 4, "prompts": 3, "samples": 2}}
    world = World(sections, engines=3, scored=HoldsPicture())
    world.rollouts = WithPictures(world.generators)
    world.run()
    for evaluated in world.scores.done.values():
        kept = [len(sample.previews) for sample in evaluated.samples]
        assert sorted(kept) == [0, 0, 0, 0, 2, 2]
        assert not any(sample.previews for sample in evaluated.samples if sample.sample)
        rows = {sample.prompt for sample in evaluated.samples}
        assert rows == {'{"prompt": "<image>", "image": "of 6 bytes in its row"}'}


TWO_SETS = {"eval": {"interval": 4, "prompts": 3, "at_start": True,
                     "sets": {"math": {}, "code": {"prompts": 2, "samples": 2}}}}  # fmt: skip


def two_sets() -> dict[str, FakePrompts]:
    return {"math": FakePrompts(), "code": FakePrompts()}


def next_controller(before: World, known: int | None = None, **changes: Any) -> World:
    """The controller after it, which knows the first ``known`` records of its journal."""
    events = cast("list[AnyEvent]", before.journal.events[:known])
    return World(
        {**TWO_SETS, **changes},
        engines=3,
        scored=two_sets(),
        scores=before.scores,
        trainer=before.trainer,
        ledger=Ledger.fold(events),
        incarnation=2,
    )


def test_all_sets_are_scored_under_their_names_at_one_version() -> None:
    world = World(TWO_SETS, engines=3, scored=two_sets())
    world.run()
    evaluated = world.scores.done
    assert {due: each.version for due, each in evaluated.items()} == {0: 0, 4: 4, 8: 8}
    sizes = Counter((sample.set, sample.prompt_index) for sample in evaluated[4].samples)
    assert sizes == {("math", 0): 1, ("math", 1): 1, ("math", 2): 1, ("code", 0): 2, ("code", 1): 2}
    (record,) = [each for each in world.telemetry.records if each.get("eval/version") == 4]
    assert (record["eval/math/reward"], record["eval/code/reward"]) == (0.0, 0.5)
    assert (record["eval/code/pass@1"], record["eval/code/pass@2"]) == (0.5, 1.0)


def test_the_initial_weights_are_scored_before_the_first_step_with_one_engine() -> None:
    world = World({**TWO_SETS, "sampler": {"name": "ready_first", "max_staleness": 0}},
                  engines=1, scored=two_sets())  # fmt: skip
    world.run()
    assert list(world.scores.done) == [0, 4, 8]


def test_an_evaluation_that_a_controller_did_not_live_to_record_is_repeated_by_the_next() -> None:
    first = World(TWO_SETS, engines=3, scored=two_sets())
    first.run()
    whole = first.scores.done.pop(8)
    next_controller(first, steps=10).run()
    assert list(first.scores.done) == [0, 4, 8]
    repeated = first.scores.done[8]
    assert repeated.samples == whole.samples
    assert (repeated.due, repeated.version) == (8, 10)  # the version served by then


def test_a_step_that_only_the_trainer_knew_of_is_scored_by_the_controller_that_adopts_it() -> None:
    first = World({**TWO_SETS, "steps": 8}, engines=3, scored=two_sets())
    first.run()
    del first.scores.done[8]
    intended = next(
        at
        for at, each in enumerate(first.journal.events)
        if isinstance(each, StepIntent) and each.step == 8
    )
    next_controller(first, intended + 1, steps=8).run()
    assert {due: each.version for due, each in first.scores.done.items()} == {0: 0, 4: 4, 8: 8}


def test_a_version_kept_by_a_trainer_that_dies_over_its_checkpoint_is_scored() -> None:
    world = World({**TWO_SETS, "checkpoint": {"interval": 8}}, engines=3, scored=two_sets())
    world.trainer.dies_after_saving = {8}
    world.run()
    world.assert_ledger_agrees()
    assert list(world.scores.done) == [0, 4, 8]


def test_an_evaluation_that_is_recorded_is_not_repeated() -> None:
    first = World(TWO_SETS, engines=3, scored=two_sets())
    first.run()
    again = next_controller(first)
    rollouts = watched(again)
    again.run()
    assert not rollouts.scored


def test_no_more_prompts_are_sampled_at_once_than_the_engine_decodes_and_as_many_again() -> None:
    world = World({"eval": {"interval": 4, "prompts": 30},
                   "generator": {"max_sequences": 2}}, engines=2, scored=FakePrompts())  # fmt: skip

    class Counting(FakeRollouts):
        open = most = 0

        async def rollout(self, fence: Any, task: RolloutTask) -> Any:
            self.open += task.evaluation
            self.most = max(self.most, self.open)
            try:
                return await super().rollout(fence, task)
            finally:
                self.open -= task.evaluation

    rollouts = world.rollouts = Counting(world.generators)
    world.run()
    assert rollouts.most == 4
    assert len(world.scores.done[8].samples) == 30
