"""A trainer under test, and what a controller does with it."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence

from incarnations import answer_of

from offbeat.config.loss_spec import LossSpec
from offbeat.controller.ports import Trainer
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.training import Chunk, StepResult, TrainerState

FENCE = Fence("run", 1)
LOSS = LossSpec()


class Bench(ABC):
    """A trainer nobody has spoken to, and chunks that it can read."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._attempts = itertools.count(1)

    @abstractmethod
    def chunk(self, *prompt_indices: int) -> Chunk:
        """These groups; the same prompt index has the same content."""

    @abstractmethod
    def unreadable(self, *prompt_indices: int) -> Chunk:
        """A chunk whose training raises, in a rank that lives."""

    @abstractmethod
    def worthless(self, *prompt_indices: int) -> Chunk:
        """A chunk of the next step to be finished, which is then not applied."""

    # --- what a controller does -----------------------------------------------------------------

    def key(self, step: int) -> StepKey:
        """The key of a begin that was never used."""
        return StepKey(step, next(self._attempts), 0)

    async def open(self, step: int) -> StepKey:
        key = self.key(step)
        await self.trainer.begin_train_step(FENCE, key, LOSS)
        return key

    async def feed(self, key: StepKey, *chunks: Chunk) -> StepKey:
        """Train these after the call of this key; the key of the last."""
        for chunk in chunks:
            key = key.next()
            await self.trainer.train_microbatch(FENCE, key, chunk)
        return key

    async def finish(self, key: StepKey) -> StepResult:
        return await self.trainer.finish_train_step(FENCE, key.next())

    async def step(self, step: int, *chunks: Sequence[int]) -> TrainerState:
        """A whole step that is applied; the state after it."""
        key = await self.feed(await self.open(step), *(self.chunk(*each) for each in chunks))
        assert (await self.finish(key)).applied
        return await self.trainer.state(FENCE)

    async def rehearse(self, *chunks: Sequence[int]) -> TrainerState:
        """What a first step of these leads to. It is undone again."""
        after = await self.step(1, *chunks)
        await self.trainer.restore(FENCE, 0)
        return after

    async def up(self) -> TrainerState:
        """Its state, once its processes have started."""
        return await answer_of(lambda: self.trainer.state(FENCE))


Story = Callable[[Bench], Awaitable[None]]
Play = Callable[[Story], None]


def weights(state: TrainerState) -> tuple[int, str]:
    return state.version, state.digest
