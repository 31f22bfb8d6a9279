"""Runs a reward function in a child process (``run_child``)."""

import asyncio
from functools import partial

from offbeat.environments.async_calls import AsyncCalls
from offbeat.environments.child_setup import (
    ChildSide,
    answer,
    copy_row,
    make_bad_reward,
    receive,
    reply_with,
    restrict_to_this_process,
    run_child,
)
from offbeat.environments.frames import RewardCall, TryBegun


def serve_rewards(child: ChildSide) -> None:
    """Score groups until the parent closes the socket."""
    reward, limits, working_dir = child.function, child.target.limits, child.target.working_dir
    reply = restrict_to_this_process(child.send)
    at_once = AsyncCalls(reward, limits, partial(reply, TryBegun())).call if limits else reward

    def answer_in_turn(call: RewardCall) -> None:
        """Answer sample by sample. Each reply tells the parent that the next call has begun."""
        for sample, response in enumerate(call.responses):
            try:
                value = reward(copy_row(call), response)
            except BaseException as error:  # noqa: BLE001 - whatever user code raises, the answer says it
                value = make_bad_reward(error, working_dir)
            reply(reply_with(call, sample, value))

    async def answer_at_once(call: RewardCall) -> None:
        async def score(sample: int) -> None:
            reply(await answer(at_once, call, sample, working_dir, is_cancelled=_is_cancelled))

        async with asyncio.TaskGroup() as samples:
            for sample in range(len(call.responses)):
                samples.create_task(score(sample), name=f"reward-{sample}")

    with asyncio.Runner() as runner:
        while (call := receive(child.frames, RewardCall)) is not None:
            if child.ready.concurrent:
                runner.run(answer_at_once(call))
            else:
                answer_in_turn(call)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


if __name__ == "__main__":
    run_child(serve_rewards)
