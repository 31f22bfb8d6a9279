"""What a caller makes of an environment worker that is lost, hangs, or comes back; without Ray."""

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from offbeat.actors.ray_worker import RayWorker
from offbeat.messages.failures import ActorLost
from offbeat.messages.worker_report import WorkerReport


class Process:
    """A handle: each ``ping`` raises what is next in ``failures``; after that it is answered."""

    def __init__(self, *failures: Exception) -> None:
        self.failures, self.pings = list(failures), 0
        self.ping = self

    def remote(self) -> "asyncio.Future[Any]":
        self.pings += 1
        reply = asyncio.get_running_loop().create_future()
        if self.failures:
            reply.set_exception(self.failures.pop(0))
        else:
            reply.set_result(WorkerReport("incarnation-0"))
        return reply


def unavailable() -> ActorUnavailableError:
    return ActorUnavailableError("it is being started", b"0" * 16)


async def lost(worker: RayWorker) -> None:
    reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    reply.set_exception(unavailable())
    with pytest.raises(ActorLost):
        await worker.answer(reply, "rollout")  # type: ignore[arg-type]


async def test_a_group_waits_for_a_worker_that_is_started_again() -> None:
    process = Process(*[unavailable()] * 3)
    worker = RayWorker("environment-0", process)
    await lost(worker)
    assert worker.gone
    await asyncio.gather(*(worker.back() for _ in range(64)))
    assert not worker.gone
    assert process.pings == 4


async def test_a_worker_that_does_not_come_back_is_told_as_lost() -> None:
    worker = RayWorker("environment-0", Process(*[unavailable()] * 1000))
    await lost(worker)
    with pytest.raises(ActorLost, match="does not answer for 120 s"):
        await worker.back()
    worker.close()


def reply(value: tuple[WorkerReport, str]) -> Any:
    answered: asyncio.Future[tuple[WorkerReport, str]] = asyncio.get_running_loop().create_future()
    answered.set_result(value)
    return answered


class Hanging:
    """Processes of which the first ``hangs`` never answer; each has to be killed."""

    def __init__(self, hangs: int) -> None:
        self.hangs, self.kills = hangs, 0

    async def ping(self, during: str) -> WorkerReport:
        if self.kills < self.hangs:
            await asyncio.get_running_loop().create_future()
        return WorkerReport(f"incarnation-{self.kills}")

    async def alive(self) -> None:
        await self.ping("a probe")

    def kill(self) -> None:
        self.kills += 1


async def test_a_worker_that_is_starting_is_given_its_time() -> None:
    process = Hanging(1)
    worker = RayWorker("environment-0", None, process)
    worker.probe()
    worker.probe()
    await asyncio.sleep(119)
    assert process.kills == 0
    worker.close()


async def test_a_worker_that_hangs_while_it_starts_is_killed() -> None:
    process = Hanging(1)
    worker = RayWorker("environment-0", None, process)
    worker.probe()
    await asyncio.sleep(121)
    assert process.kills == 1
    worker.probe()
    await asyncio.sleep(121)
    assert process.kills == 1, "the next one answered"


async def test_a_worker_that_hangs_each_time_it_is_started_again_is_killed_each_time() -> None:
    process = Hanging(3)
    worker = RayWorker("environment-0", None, process)
    await lost(worker)
    await asyncio.sleep(361)
    assert process.kills == 3
    await worker.back()
    assert not worker.gone


async def test_each_process_of_a_worker_is_reported_once_it_answers() -> None:
    """The first one hangs while it starts, and is killed."""
    process, heard = Hanging(1), list[tuple[str, str]]()
    worker = RayWorker("environment-0", None, process)
    worker.on_joined = lambda name, incarnation: heard.append((name, incarnation))
    worker.introduce()
    worker.introduce()
    await asyncio.sleep(121)
    worker.introduce()
    await asyncio.sleep(1)
    assert heard == [("environment-0", "incarnation-1")]
    worker.close()


async def test_a_process_that_was_replaced_while_nobody_called_it_is_reported_with_the_next_answer() -> (
    None
):
    worker, heard = RayWorker("environment-0", None, Hanging(0)), list[str]()
    worker.on_joined = lambda name, incarnation: heard.append(incarnation)
    for incarnation in ("incarnation-0", "incarnation-0", "incarnation-1", "incarnation-1"):
        assert (
            await worker.answer(reply((WorkerReport(incarnation), "a group")), "rollout")
            == "a group"
        )
    assert heard == ["incarnation-0", "incarnation-1"]


async def test_an_answer_that_comes_after_that_of_the_next_process_replaces_nobody() -> None:
    worker, heard = RayWorker("environment-0", None, Hanging(0)), list[str]()
    worker.on_joined = lambda name, incarnation: heard.append(incarnation)
    for incarnation in ("incarnation-0", "incarnation-1", "incarnation-0"):
        await worker.answer(reply((WorkerReport(incarnation), "a group")), "rollout")
    assert heard == ["incarnation-0", "incarnation-1"]


def told(worker: RayWorker) -> list[str]:
    """What the worker reports of its processes, in order."""
    heard = list[str]()
    worker.on_joined = lambda name, incarnation: heard.append(f"{name} is {incarnation}")
    worker.on_lost = lambda name, reason: heard.append(f"{name} is lost: {reason}")
    return heard


async def test_a_process_that_is_lost_is_reported_once_and_again_as_back_if_it_was_only_out_of_reach() -> (
    None
):
    worker = RayWorker("environment-0", Process())
    heard = told(worker)
    worker.introduce()
    await asyncio.sleep(1)
    await asyncio.gather(lost(worker), lost(worker))
    await worker.back()
    assert heard == [
        "environment-0 is incarnation-0",
        "environment-0 is lost: its process was killed or crashed, or the network to it is cut",
        "environment-0 is incarnation-0",
    ]


async def test_a_process_that_hangs_is_lost_when_it_is_killed_and_its_late_answer_brings_nothing_back() -> (
    None
):
    process = Hanging(1)
    worker = RayWorker("environment-0", None, process)
    heard = told(worker)
    await worker.answer(reply((WorkerReport("incarnation-9"), "a group")), "rollout")
    worker.probe()
    await asyncio.sleep(11)
    await worker.answer(reply((WorkerReport("incarnation-9"), "a group")), "rollout")
    worker.probe()
    await asyncio.sleep(1)
    assert heard == [
        "environment-0 is incarnation-9",
        "environment-0 is lost: it did not answer for 10 s and was killed",
        "environment-0 is incarnation-1",
    ]


class CutOff(Hanging):
    """A process that stops answering at ``at_s``; one is started in its place when it is killed."""

    def __init__(self, at_s: float, *, blocked: bool = False) -> None:
        super().__init__(0)
        self.at_s, self.blocked = at_s, blocked

    async def _is_silent(self) -> bool:
        return not self.kills and asyncio.get_running_loop().time() >= self.at_s

    async def ping(self, during: str) -> WorkerReport:
        if await self._is_silent():
            await asyncio.get_running_loop().create_future()
        return await super().ping(during)

    async def alive(self) -> None:
        if await self._is_silent() and not self.blocked:
            await asyncio.get_running_loop().create_future()


async def pending(worker: RayWorker) -> float:
    """Make a call that is never answered; return when it failed."""
    loop = asyncio.get_running_loop()
    reply: asyncio.Future[Any] = loop.create_future()
    with pytest.raises(ActorLost, match="did not answer for 20 s and was killed"):
        await worker.answer(reply, "rollout")  # type: ignore[arg-type]
    return loop.time()


async def test_calls_to_a_machine_that_is_cut_off_fail_long_before_anybody_reports_its_loss() -> (
    None
):
    process = CutOff(at_s=5)
    worker = RayWorker("environment-0", None, process)
    heard = told(worker)
    worker.introduce()
    failed_at = await asyncio.gather(*(pending(worker) for _ in range(3)))
    assert max(failed_at) <= 5 + 2 * (2 + 10)
    await worker.back()
    assert heard == [
        "environment-0 is incarnation-0",
        "environment-0 is lost: it did not answer for 20 s and was killed",
        "environment-0 is incarnation-1",
    ]


async def test_a_worker_whose_environment_blocks_it_for_minutes_keeps_its_process() -> None:
    process = CutOff(at_s=5, blocked=True)
    worker = RayWorker("environment-0", None, process)
    worker.introduce()
    call = asyncio.ensure_future(pending(worker))
    await asyncio.sleep(500)
    assert process.kills == 0
    assert not call.done()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    worker.close()


async def test_a_worker_without_calls_is_not_probed() -> None:
    process = CutOff(at_s=5)
    worker = RayWorker("environment-0", None, process)
    await worker.answer(reply((WorkerReport("incarnation-0"), "a group")), "rollout")
    await asyncio.sleep(500)
    assert process.kills == 0
