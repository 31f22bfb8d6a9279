"""What a ``Trainer`` promises its controller, sentence by sentence, whoever implements the port."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from trainer_bench import FENCE, LOSS, Bench, Play, weights

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.loss import ClippedPgLossConfig
from offbeat.messages.failures import (
    PayloadLost,
    StaleFence,
    StepAlreadyOpen,
    StepOutOfOrder,
    TrainStepFailed,
    UnfitGroup,
)
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.training import TrainerState

NEWER = Fence("run", 2)


class TrainerContract:
    """``play`` tells a story on a fresh bench, to its end."""

    # --- versions --------------------------------------------------------------------------------

    def test_a_fresh_trainer_holds_version_0_and_has_applied_nothing(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            state = await on.trainer.state(FENCE)
            assert (state.version, state.last_step, state.last_attempt) == (0, 0, 0)
            assert state.digest and state.parameters > 0 and state.ranks > 0

        play(story)

    def test_each_applied_step_is_a_version_with_weights_of_its_own(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            seen = [await on.trainer.state(FENCE)]
            seen += [
                await on.step(1, (0, 1), (2,)),
                await on.step(2, (3, 4)),
                await on.step(3, (5,)),
            ]
            assert [each.version for each in seen] == [0, 1, 2, 3]
            assert [each.last_step for each in seen] == [0, 1, 2, 3]
            assert [each.last_attempt for each in seen] == [0, 1, 2, 3]
            assert len({each.digest for each in seen}) == 4

        play(story)

    def test_other_groups_make_other_weights_and_the_same_ones_the_same(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            one, other = await on.rehearse((0,), (1,)), await on.rehearse((0,), (2,))
            assert one.digest != other.digest
            assert await on.step(1, (0,), (1,)) == msgspec.structs.replace(one, last_attempt=3)

        play(story)

    def test_a_step_that_is_not_applied_leaves_everything_as_it_was(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            before = await on.step(1, (0,))
            key = await on.feed(await on.open(2), on.worthless(1, 2))
            result = await on.finish(key)
            assert not result.applied and result.reason
            assert await on.trainer.state(FENCE) == before
            assert (await on.step(2, (3,))).version == 2

        play(story)

    # --- the calls of a step ---------------------------------------------------------------------

    def test_only_the_step_after_the_version_it_holds_can_begin(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            before = await on.trainer.state(FENCE)
            for wrong in (0, 2, 7):
                with pytest.raises(StepOutOfOrder):
                    await on.open(wrong)
            assert await on.trainer.state(FENCE) == before
            await on.step(1, (0,))
            with pytest.raises(StepOutOfOrder):
                await on.open(1)
            assert (await on.step(2, (1,))).version == 2

        play(story)

    def test_one_step_is_open_at_a_time(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            key = await on.open(1)
            with pytest.raises(StepAlreadyOpen) as refused:
                await on.open(1)
            assert (refused.value.open_step, refused.value.open_attempt) == key.attempt_id
            assert (await on.finish(await on.feed(key, on.chunk(0)))).applied

        play(story)

    def test_a_repeated_key_gets_the_stored_reply_and_trains_once(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            once = await on.rehearse((0,), (1,))
            trainer, key = on.trainer, await on.open(1)
            await trainer.begin_train_step(FENCE, key, LOSS)
            for prompt_index in (0, 1):
                key, chunk = key.next(), on.chunk(prompt_index)
                first = await trainer.train_microbatch(FENCE, key, chunk)
                assert await trainer.train_microbatch(FENCE, key, chunk) == first
            result = await on.finish(key)
            assert await on.finish(key) == result
            assert await trainer.train_microbatch(FENCE, key, on.chunk(1)) == first
            assert weights(await trainer.state(FENCE)) == weights(once)

        play(story)

    def test_a_call_that_is_not_the_next_is_refused_and_trains_nothing(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            once, trainer = await on.rehearse((0,)), on.trainer
            key = await on.open(1)
            with pytest.raises(StepOutOfOrder):
                await trainer.train_microbatch(FENCE, key.next().next(), on.chunk(7))
            with pytest.raises(StepOutOfOrder):
                await trainer.finish_train_step(FENCE, key.next().next())
            with pytest.raises(StepOutOfOrder):
                await trainer.train_microbatch(FENCE, StepKey(1, key.attempt + 1, 1), on.chunk(7))
            await trainer.abort_train_step(FENCE, key)
            for _ in range(2):
                with pytest.raises(StepOutOfOrder):
                    await on.feed(key, on.chunk(7))
            assert (await trainer.state(FENCE)).version == 0
            assert weights(await on.step(1, (0,))) == weights(once)

        play(story)

    def test_after_a_call_that_failed_the_step_is_only_good_for_abort(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            once, trainer = await on.rehearse((0,), (1,)), on.trainer
            before = await trainer.state(FENCE)
            key = await on.feed(await on.open(1), on.chunk(0))
            with pytest.raises((TrainStepFailed, UnfitGroup, PayloadLost)):
                await on.feed(key, on.unreadable(1))
            for late in (key.next(), key.next().next()):
                with pytest.raises(StepOutOfOrder):
                    await trainer.train_microbatch(FENCE, late, on.chunk(1))
                with pytest.raises(StepOutOfOrder):
                    await trainer.finish_train_step(FENCE, late)
            with pytest.raises(StepAlreadyOpen):
                await on.open(1)
            await trainer.abort_train_step(FENCE, key)
            assert await trainer.state(FENCE) == before
            assert weights(await on.step(1, (0,), (1,))) == weights(once)

        play(story)

    def test_calls_are_served_in_the_order_they_are_made(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            once, trainer = await on.rehearse((0,), (1,), (2,)), on.trainer
            key = on.key(1)
            async with asyncio.TaskGroup() as group:
                group.create_task(trainer.begin_train_step(FENCE, key, LOSS))
                for prompt_index in range(3):
                    key = key.next()
                    group.create_task(trainer.train_microbatch(FENCE, key, on.chunk(prompt_index)))
                result = group.create_task(trainer.finish_train_step(FENCE, key.next()))
            assert result.result().applied and result.result().chunks > 0
            assert weights(await trainer.state(FENCE)) == weights(once)

        play(story)

    # --- abort -----------------------------------------------------------------------------------

    def test_an_abort_without_a_step_does_nothing(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            trainer = on.trainer
            before = await trainer.state(FENCE)
            await trainer.abort_train_step(FENCE, on.key(1))
            assert await trainer.state(FENCE) == before
            key = await on.feed(await on.open(1), on.chunk(0))
            result = await on.finish(key)
            after = await trainer.state(FENCE)
            await trainer.abort_train_step(FENCE, key)
            assert await trainer.state(FENCE) == after
            assert await on.finish(key) == result

        play(story)

    def test_an_aborted_step_leaves_no_trace(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            once, trainer = await on.rehearse((0,), (1,)), on.trainer
            before = await trainer.state(FENCE)
            key = await on.open(1)
            await on.feed(key, on.chunk(0), on.chunk(7))
            for _ in range(2):
                await trainer.abort_train_step(FENCE, key)
                assert await trainer.state(FENCE) == before
            with pytest.raises(StepOutOfOrder):
                await trainer.begin_train_step(FENCE, key, LOSS)
            assert weights(await on.step(1, (0,), (1,))) == weights(once)

        play(story)

    def test_an_abort_of_an_older_attempt_does_not_touch_the_open_one(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            older = await on.open(1)
            await on.trainer.abort_train_step(FENCE, older)
            key = await on.feed(await on.open(1), on.chunk(0))
            await on.trainer.abort_train_step(FENCE, older)
            assert (await on.finish(key)).applied

        play(story)

    # --- fences ----------------------------------------------------------------------------------

    def test_once_a_newer_controller_has_spoken_every_call_of_the_older_is_refused(
        self, play: Play
    ) -> None:
        async def story(on: Bench) -> None:
            trainer, chunk = on.trainer, on.chunk(0)
            opened = await on.open(1)
            before = await trainer.state(NEWER)
            key = opened.next()
            calls: list[Callable[[], Awaitable[object]]] = [
                lambda: trainer.state(FENCE),
                lambda: trainer.prepare_logprobs(FENCE, chunk, LOSS),
                lambda: trainer.begin_train_step(FENCE, opened, LOSS),
                lambda: trainer.train_microbatch(FENCE, key, chunk),
                lambda: trainer.finish_train_step(FENCE, key),
                lambda: trainer.abort_train_step(FENCE, opened),
                lambda: trainer.publish_weights(FENCE, 0),
                lambda: trainer.save(FENCE, 0),
                lambda: trainer.save_checkpoint(FENCE, 0),
                lambda: trainer.restore(FENCE, 0),
                lambda: trainer.state(Fence("another run", 9)),
            ]
            for call in calls:
                with pytest.raises(StaleFence):
                    await call()
            await trainer.train_microbatch(NEWER, key, chunk)
            assert (await trainer.finish_train_step(NEWER, key.next())).applied
            with pytest.raises(StaleFence):
                await trainer.state(FENCE)
            assert (await trainer.state(NEWER)).version == before.version + 1

        play(story)

    # --- weights and columns ---------------------------------------------------------------------

    def test_what_is_published_is_the_version_it_holds_and_no_other(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            trainer = on.trainer
            await on.up()
            releases = [await trainer.publish_weights(FENCE, 0)]
            for step in (1, 2):
                await on.step(step, (step,))
                releases.append(await trainer.publish_weights(FENCE, step))
            for wrong in (0, 1, 3):
                with pytest.raises(TrainStepFailed):
                    await trainer.publish_weights(FENCE, wrong)
            assert [each.version for each in releases] == [0, 1, 2]
            assert len({each.digest for each in releases}) == 3
            assert (await trainer.publish_weights(FENCE, 2)).digest == releases[2].digest
            await trainer.restore(FENCE, 0)
            assert (await trainer.publish_weights(FENCE, 0)).digest == releases[0].digest

        play(story)

    def test_prepared_logprobs_are_a_payload_a_group_and_train_nothing(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            before = await on.trainer.state(FENCE)
            loss = LossSpec(ClippedPgLossConfig(old_logprobs="policy"))
            made = await on.trainer.prepare_logprobs(FENCE, on.chunk(0, 1, 2), loss)
            assert made.columns == ("policy_logprobs",)
            assert len(made.payloads) == len(made.payload_bytes) == 3
            assert min(made.payload_bytes) > 0
            assert await on.trainer.state(FENCE) == before

        play(story)

    # --- checkpoints -----------------------------------------------------------------------------

    def test_a_restored_trainer_goes_on_bit_for_bit_as_it_did_the_first_time(
        self, play: Play
    ) -> None:
        async def story(on: Bench) -> None:
            trainer = on.trainer
            kept = await on.step(1, (0,), (1,))
            made = await trainer.save_checkpoint(FENCE, 1)
            assert (made.version, made.digest) == weights(kept)
            first = [await on.step(2, (2, 3)), await on.step(3, (4,))]
            assert await trainer.restore(FENCE, 3) == kept
            assert await trainer.state(FENCE) == kept
            again = [await on.step(2, (2, 3)), await on.step(3, (4,))]
            assert [weights(each) for each in again] == [weights(each) for each in first]

        play(story)

    def test_a_restore_takes_the_newest_that_is_not_too_new_and_abandons_what_is_newer(
        self, play: Play
    ) -> None:
        async def story(on: Bench) -> None:
            trainer, kept = on.trainer, list[TrainerState]()
            for step in (1, 2, 3):
                kept.append(await on.step(step, (step,)))
                if step > 1:  # two are kept at the least
                    await trainer.save_checkpoint(FENCE, step)
            assert await trainer.restore(FENCE, 2) == kept[1]
            assert (await on.step(3, (9,))).digest != kept[2].digest
            assert await trainer.restore(FENCE, 3) == kept[1]

        play(story)

    def test_without_a_checkpoint_that_is_old_enough_a_restore_is_the_initial_model(
        self, play: Play
    ) -> None:
        async def story(on: Bench) -> None:
            initial = await on.trainer.state(FENCE)
            await on.step(1, (0,))
            assert await on.trainer.restore(FENCE, 1) == initial
            await on.step(1, (0,))
            await on.step(2, (1,))
            await on.trainer.save_checkpoint(FENCE, 2)
            assert await on.trainer.restore(FENCE, 1) == initial

        play(story)

    def test_a_restore_drops_the_open_step_and_forgets_no_attempt(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            once, trainer = await on.rehearse((0,)), on.trainer
            opened = await on.open(1)
            key = await on.feed(opened, on.chunk(7))
            await trainer.restore(FENCE, 0)
            with pytest.raises(StepOutOfOrder):
                await on.finish(key)
            with pytest.raises(StepOutOfOrder):
                await trainer.begin_train_step(FENCE, opened, LOSS)
            assert weights(await on.step(1, (0,))) == weights(once)

        play(story)

    def test_a_version_it_does_not_hold_is_not_kept(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            before = await on.trainer.state(FENCE)
            with pytest.raises(TrainStepFailed):
                await on.trainer.save_checkpoint(FENCE, 3)
            assert await on.trainer.restore(FENCE, 3) == before

        play(story)

    # --- incarnations ---------------------------------------------------------------------------

    def test_new_processes_hold_the_initial_model_and_restore_what_was_kept(
        self, play: Play
    ) -> None:
        async def story(on: Bench) -> None:
            trainer = on.trainer
            initial = await on.up()
            kept = await on.step(1, (0,))
            await trainer.save_checkpoint(FENCE, 1)
            after = await on.step(2, (1,))
            await on.feed(await on.open(3), on.chunk(2))
            await trainer.restart()
            fresh = await on.up()
            assert fresh.incarnation != initial.incarnation
            assert fresh == msgspec.structs.replace(initial, incarnation=fresh.incarnation)
            restored = msgspec.structs.replace(kept, incarnation=fresh.incarnation)
            assert await trainer.restore(FENCE, 9) == restored
            assert weights(await on.step(2, (1,))) == weights(after)

        play(story)
