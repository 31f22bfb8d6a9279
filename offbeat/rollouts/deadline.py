"""Enforces the deadline of a rollout, and separates waits for the engine from other waits."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from offbeat.messages.failures import Component, FailureKind, RolloutFailed
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.messages.groups import LATE, RolloutTask
from offbeat.rollouts.calls import Generate

T = TypeVar("T")


async def within_deadline(
    task: RolloutTask,
    generate: Generate,
    roll_out: Callable[[Generate], Awaitable[T]],
    *,
    limit_s: float | None = None,
) -> T:
    """Run a rollout, or one sample of it, and cancel it at the task's deadline.

    A late rollout counts against its engine only if it waits for the engine. An environment that
    hangs must not cause the restart of a healthy engine.

    Args:
        task: Task with the deadline.
        generate: Sends one request to the task's engine.
        roll_out: The rollout. It receives the function to call instead of ``generate``.
        limit_s: Remaining seconds of the deadline. None means all of it.

    Raises:
        RolloutFailed: ``deadline``, attributed to the engine if a request to it was open, else to
            the environment.
    """
    waits_for_engine, loop = False, asyncio.get_running_loop()

    async def generate_watched(request: GenerateRequest) -> GenerateResult:
        nonlocal waits_for_engine
        try:
            return await generate(request)
        except asyncio.CancelledError:
            # Before the deadline only the rollout itself cancels a request: an agent may.
            ends_at = deadline.when()
            waits_for_engine |= ends_at is not None and loop.time() >= ends_at
            raise

    deadline = asyncio.timeout(task.deadline_s if limit_s is None else limit_s)
    try:
        async with deadline:
            return await roll_out(generate_watched)
    except TimeoutError as error:
        if not deadline.expired():
            raise
        source = Component.ENGINE if waits_for_engine else Component.ENVIRONMENT
        late = task.engine if waits_for_engine else "the environment"
        left = "" if limit_s is None else f"the {limit_s:.3g} s that were left of "
        detail = f"{late} took longer than {left}rollout.deadline_s={task.deadline_s:g}"
        raise RolloutFailed(
            FailureKind.INFRASTRUCTURE, task.prompt_index, task.attempt, LATE, detail, source
        ) from error
