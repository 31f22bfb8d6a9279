"""What a ``Generator`` promises its controller, sentence by sentence, whoever implements the port."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from in_process import InProcessGenerator
from incarnations import next_incarnation

from offbeat.controller.ports import Generator
from offbeat.messages.failures import ActorLost, StaleFence, WeightSyncFailed
from offbeat.messages.fences import Fence
from offbeat.messages.weights import EngineState, WeightRelease, WeightsAck
from tests.support.holding_engines import HoldingEngine

FENCE = Fence("run", 1)
NEWER = Fence("run", 2)


class Bench(ABC):
    """An engine nobody has spoken to, and releases that it can take."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator

    @abstractmethod
    def release(self, version: int) -> WeightRelease:
        """The same version is always the same release, another one another."""

    @abstractmethod
    def torn(self, version: int) -> WeightRelease:
        """A release that does not verify when it is taken next."""

    @abstractmethod
    async def half_sent(self, epoch: int, version: int) -> asyncio.Future[WeightsAck]:
        """Begin a transfer; return once the engine has received it and before it has taken it."""

    async def load(self, epoch: int, version: int) -> WeightsAck:
        return await self.generator.load_weights(FENCE, epoch, self.release(version))

    async def up(self, *, after: str = "") -> EngineState:
        """Its state, once a process has started; not that of the incarnation ``after`` which it comes."""
        return await next_incarnation(self.generator, FENCE, after)


class HoldingBench(Bench):
    """An engine of this process that can be held in the middle of a transfer."""

    generator: InProcessGenerator

    def torn(self, version: int) -> WeightRelease:
        whole = self.release(version)
        return msgspec.structs.replace(whole, chunks=whole.chunks[:-1])

    async def half_sent(self, epoch: int, version: int) -> asyncio.Future[WeightsAck]:
        engine = self.generator.engine
        assert isinstance(engine, HoldingEngine)
        await engine.hold()
        transfer = asyncio.ensure_future(self.load(epoch, version))
        await engine.until_held()
        return transfer


Story = Callable[[Bench], Awaitable[None]]
Play = Callable[[Story], None]


def served(told: EngineState | WeightsAck) -> tuple[str, int | None, str | None]:
    return told.incarnation, told.version, told.digest


class GeneratorContract:
    """``play`` tells a story on a fresh bench, to its end."""

    def test_a_fresh_engine_has_a_name_and_an_incarnation_and_no_version(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            state = await on.generator.state(FENCE)
            assert (state.name, state.version, state.digest) == (on.generator.name, None, None)
            assert state.incarnation
            assert (state.running, state.waiting, state.tokens, state.busy_s) == (0, 0, 0, 0)

        play(story)

    def test_an_ack_says_what_is_served_from_then_on(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            before = await on.generator.state(FENCE)
            for epoch, version in ((3, 0), (4, 5), (9, 2)):  # a rewind brings older ones again
                release = on.release(version)
                ack = await on.load(epoch, version)
                assert (ack.engine, ack.epoch) == (on.generator.name, epoch)
                assert served(ack) == (before.incarnation, version, release.digest)
                assert served(await on.generator.state(FENCE)) == served(ack)
                assert min(ack.transfer_s, ack.pause_s) >= 0

        play(story)

    def test_an_epoch_that_is_not_newer_is_refused_and_changes_nothing(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            ack = await on.load(5, 1)
            for old in (5, 4, 0):
                with pytest.raises(WeightSyncFailed) as refused:
                    await on.load(old, 2)
                assert (refused.value.engine, refused.value.epoch) == (on.generator.name, old)
                assert refused.value.version == 2
                assert served(await on.generator.state(FENCE)) == served(ack)
            assert (await on.load(6, 2)).version == 2

        play(story)

    def test_of_two_transfers_at_once_the_newer_is_served_in_the_end(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            older, newer = await asyncio.gather(
                on.load(1, 1), on.load(2, 2), return_exceptions=True
            )
            assert isinstance(newer, WeightsAck)
            assert isinstance(older, WeightsAck | WeightSyncFailed)
            assert served(await on.generator.state(FENCE)) == served(newer)

        play(story)

    def test_a_release_that_does_not_verify_is_refused_and_the_old_one_goes_on(
        self, play: Play
    ) -> None:
        async def story(on: Bench) -> None:
            await on.up()
            with pytest.raises(WeightSyncFailed):
                await on.generator.load_weights(FENCE, 1, on.torn(1))
            assert (await on.generator.state(FENCE)).version is None
            ack = await on.load(2, 1)
            with pytest.raises(WeightSyncFailed):
                await on.generator.load_weights(FENCE, 3, on.torn(2))
            assert served(await on.generator.state(FENCE)) == served(ack)
            assert (await on.load(4, 2)).version == 2

        play(story)

    def test_once_a_newer_controller_has_spoken_the_older_is_refused(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            generator, ack = on.generator, await on.load(1, 1)
            assert served(await generator.state(NEWER)) == served(ack)
            with pytest.raises(StaleFence):
                await generator.state(FENCE)
            with pytest.raises(StaleFence):
                await on.load(2, 2)
            with pytest.raises(StaleFence):
                await generator.state(Fence("another run", 9))
            assert served(await generator.state(NEWER)) == served(ack)
            assert (await generator.load_weights(NEWER, 2, on.release(2))).version == 2

        play(story)

    def test_a_restarted_engine_is_another_incarnation_without_weights(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            ack = await on.load(7, 1)
            await on.generator.restart()
            state = await on.up(after=ack.incarnation)
            assert (state.version, state.digest) == (None, None)
            again = await on.load(1, 1)  # epochs are counted in each incarnation anew
            assert (again.version, again.digest) == (ack.version, ack.digest)
            assert served(again) == served(await on.generator.state(FENCE)) != served(ack)

        play(story)

    def test_a_retired_engine_answers_no_more(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            await on.load(7, 1)
            await on.generator.retire()
            with pytest.raises(ActorLost):
                await on.generator.state(FENCE)

        play(story)

    def test_a_transfer_into_an_engine_that_dies_is_lost_with_it(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            before = await on.up()
            transfer = await on.half_sent(1, 1)
            assert not transfer.done()
            await on.generator.restart()
            with pytest.raises(ActorLost):
                await transfer
            assert (await on.up(after=before.incarnation)).version is None

        play(story)
