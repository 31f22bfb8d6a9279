import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from offbeat.environments.async_calls import CallLimits
from offbeat.environments.frames import RewardTarget
from offbeat.environments.killable import ChildPool, RewardFailed
from offbeat.environments.reward_value import BadReward, NamedRewards, parse_reward, short_answer

HERE = Path(__file__).parent
AT_ONCE = CallLimits(deadline_s=60.0, concurrency=8)


@asynccontextmanager
async def pool_of(
    name: str,
    *,
    size: int = 1,
    deadline_s: float = 20.0,
    memory_mib: int = 2048,
    limits: CallLimits | None = None,
    **options: Any,
) -> AsyncIterator[ChildPool]:
    target = RewardTarget(name, HERE, options, memory_mib, deadline_s, 120.0, limits=limits)
    pool = ChildPool(target, size)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


async def score_with(
    pool: ChildPool, row: dict[str, Any], responses: Sequence[str]
) -> list[float | NamedRewards | None]:
    """Return the rewards; a number for one that names no answer."""
    rewards = await pool.call(row, responses)
    return [each.reward if each is not None and each.answer is None else each for each in rewards]


def rewards(
    name: str, *responses: str, prompt: dict[str, Any] | None = None, **limits: Any
) -> list[float | NamedRewards | None]:
    async def score() -> list[float | NamedRewards | None]:
        async with pool_of(f"user_rewards:{name}", **limits) as pool:
            return await score_with(pool, prompt or {}, responses)

    return asyncio.run(score())


def failure(name: str, *responses: str, **limits: Any) -> str:
    with pytest.raises(RewardFailed) as caught:
        rewards(name, *responses, **limits)
    return str(caught.value)


def test_each_response_gets_the_reward_of_the_function() -> None:
    assert rewards("length", "a", "", "abc", prompt={"offset": 1}, scale=0.5) == [1.5, 1.0, 2.5]


def test_a_function_may_name_the_final_answer_of_a_response() -> None:
    long = "1" * 999
    seven, none, nothing, digest = rewards("answered", "7", "?", "", long)
    assert (seven, none) == (NamedRewards(1.0, {}, "7"), NamedRewards(0.0, {}, ""))
    assert nothing == 0.0, "the function has named no answer"
    assert digest == NamedRewards(0.0, {}, short_answer(long))


@pytest.mark.parametrize("name", ["with_other_keys", "with_a_number"])
def test_a_mapping_that_is_no_reward_and_answer_is_refused_with_what_it_holds(name: str) -> None:
    told = failure(name, "7")
    assert told.startswith("reward_wrong_type: the reward is a mapping of {")
    assert told.endswith("return a float, or a mapping of 'reward' (float) and 'answer' (str)")


def test_bools_and_scalars_of_arrays_and_tensors_are_rewards() -> None:
    assert rewards("boolean", "a") == [1.0]
    scalars = [np.bool_(True), np.float32(0.5), np.array(0.25), torch.tensor(2.0)]  # noqa: FBT003
    assert list(map(parse_reward, scalars)) == [1.0, 0.5, 0.25, 2.0]
    assert all(isinstance(parse_reward(each), BadReward) for each in (np.ones(1), np.array("1")))


def test_a_row_may_hold_an_integer_of_any_size() -> None:
    assert rewards("length", "", prompt={"offset": 10**30}) == [1e30]


def test_a_message_of_any_length_and_any_characters_is_one_short_line() -> None:
    told = failure("quotes", "\x1b[2J\n", times=10**6)
    assert "in quotes: ValueError: \\x1b[2J \\x1b[2J " in told
    assert "characters more" in told and "\\udcff" in failure("quotes", "", times=1)
    assert len(told) < 10_000 and told.isprintable()


def test_a_process_that_user_code_forked_scores_no_sample_of_another_group() -> None:
    async def scored() -> list[tuple[str, list[Any]]]:
        scores = list[tuple[str, list[Any]]]()
        async with pool_of("user_rewards:forks") as pool:
            for response in ("a", "bb", "ccc", "dddd"):
                with suppress(RewardFailed):
                    scores.append((response, await score_with(pool, {}, [response])))
        return scores

    scores = asyncio.run(scored())
    assert scores, "not every call failed"
    assert all(got == [len(response)] for response, got in scores)


def test_the_answer_of_the_process_that_was_asked_counts_and_never_that_of_its_fork() -> None:
    async def scored() -> list[list[Any]]:
        async with pool_of("user_rewards:forks_and_scores_less_in_the_fork") as pool:
            return [await score_with(pool, {}, ["a", "b"]) for _ in range(3)]

    assert asyncio.run(scored()) == [[0.75, 0.75]] * 3


@pytest.mark.parametrize("name", ["counts_calls_in_its_row", "counts_calls_at_once"])
def test_a_function_that_changes_its_row_changes_it_for_no_other_sample(name: str) -> None:
    assert rewards(name, "a", "b", "c", prompt={"seen": []}) == [1.0] * 3


def test_a_child_that_answers_twice_for_one_sample_and_never_for_another_has_no_rewards() -> None:
    assert failure("forges", "a", "b").startswith("reward_answered_twice: sample 0")


@pytest.mark.parametrize("sample", [-1, 2])
def test_a_child_that_answers_for_a_sample_that_there_is_not_has_no_rewards(sample: int) -> None:
    assert failure("forges", "a", "b", sample=sample).startswith("reward_process_died: it sent")


def test_a_child_that_answers_with_neither_rewards_nor_a_problem_has_no_rewards() -> None:
    assert failure("forges", "a", "b", empty=True).startswith("reward_process_died: it sent")


def test_a_call_that_cannot_be_sent_costs_nobody_else_a_place() -> None:
    async def scenario() -> None:
        async with pool_of("user_rewards:length") as pool:
            with pytest.raises(UnicodeEncodeError):
                await score_with(pool, {"lone surrogate": "\ud800"}, ["a"])
            assert await score_with(pool, {}, []) == []
            assert await score_with(pool, {}, ["ab"]) == [2.0]

    asyncio.run(scenario())


def test_a_child_that_ends_before_its_first_call_is_told_once_and_not_restarted_for_ever() -> None:
    async def scenario() -> None:
        async with pool_of("user_rewards:length") as pool:
            (pid,) = pool.pids
            os.kill(pid, signal.SIGKILL)
            while pool.pids:  # noqa: ASYNC110 - the pool tells nobody
                await asyncio.sleep(0)
            with pytest.raises(RewardFailed, match="reward_process_died"):
                await score_with(pool, {}, ["a"])
            assert await score_with(pool, {}, ["ab"]) == [2.0]

    asyncio.run(scenario())


def test_an_integer_is_a_reward() -> None:
    assert rewards("whole", "ab") == [2.0]


def test_what_user_code_prints_does_not_disturb_the_protocol() -> None:
    assert rewards("chatters", "a", "b") == [1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "response", "told"),
    [
        ("raises", "bad", r"reward_raised: user_rewards.py:\d+ in raises: KeyError: 'answer'"),
        ("none", "a", "reward_none: the reward is None; return a float on every path"),
        ("not_a_number", "nan", "reward_not_finite: the reward is nan"),
        ("not_a_number", "inf", "reward_not_finite: the reward is inf"),
        ("not_a_number", "1e39", "reward_not_finite: the reward is 1e"),
        ("text", "a", "reward_wrong_type: the reward is str '1.0'; return a float"),
        ("listed", "a", r"reward_wrong_type: the reward is list \[1.0\]"),
        ("exits", "a", r"reward_raised: user_rewards.py:\d+ in exits: SystemExit: 2"),
        (
            "exits_at_once",
            "a",
            r"reward_raised: user_rewards.py:\d+ in exits_at_once: SystemExit: 2",
        ),
        (
            "interrupts",
            "a",
            r"reward_raised: user_rewards.py:\d+ in interrupts: KeyboardInterrupt$",
        ),
        ("leaves", "a", "reward_process_died: .*user_rewards:leaves ended with exit code 3"),
    ],
)
def test_what_is_no_reward_is_told_and_never_zero(name: str, response: str, told: str) -> None:
    assert re.match(told, failure(name, "1", response))


def test_a_hang_is_killed_at_its_deadline_though_it_ignores_sigterm() -> None:
    told = failure("hangs", "ok", "hang", deadline_s=0.3)
    assert told == "reward_deadline: user_rewards:hangs ran longer than 0.3 s; killed"


def test_the_deadline_is_that_of_one_sample_for_a_plain_function() -> None:
    assert rewards("slow", "a", "b", "c", "d", deadline_s=1.5) == [1.0] * 4


def test_an_async_function_scores_its_samples_at_once_under_one_deadline() -> None:
    assert rewards("waits", *["0.1"] * 8, deadline_s=0.6) == [1.0] * 8
    assert failure("waits", "0.2", "0.4", "0.6", deadline_s=0.3).startswith("reward_deadline")


def test_memory_beyond_the_cap_is_refused() -> None:
    told = failure("eats_memory", "a", memory_mib=512)
    assert told.endswith("in eats_memory: MemoryError")


def test_the_pool_is_back_to_size_after_every_kind_of_death() -> None:
    async def scenario() -> None:
        async with pool_of("user_rewards:hangs", size=2, deadline_s=0.3) as pool:
            before = set(pool.pids)
            calls = (score_with(pool, {}, ["hang"]) for _ in range(4))
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [RewardFailed] * 4
            assert (
                await asyncio.gather(*(score_with(pool, {}, ["ok"]) for _ in range(4)))
                == [[1.0]] * 4
            )
            after = set(pool.pids)
            assert len(before) == len(after) == 2
            assert not before & after
            assert not any(psutil.pid_exists(pid) for pid in before)
        assert not any(psutil.pid_exists(pid) for pid in after)

    asyncio.run(scenario())


def test_a_cancelled_call_costs_its_process_and_not_its_place() -> None:
    async def scenario() -> None:
        async with pool_of("user_rewards:hangs") as pool:
            (pid,) = pool.pids
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await score_with(pool, {}, ["hang"])
            assert await score_with(pool, {}, ["ok"]) == [1.0]
            assert not psutil.pid_exists(pid)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("name", "responses", "made"),
    [
        ("length", ["a", "b", "c"], 3),
        ("hangs", ["ok", "hang", "ok"], 2),  # the third sample's turn never comes
        ("waits", ["0.01", "0.01", "0.01"], 3),
        ("waits", ["60", "60", "0.01"], 3),  # killed at the deadline, two calls open
    ],
)
def test_calls_are_counted_as_they_begin_those_of_a_killed_process_too(
    name: str, responses: list[str], made: int
) -> None:
    async def scenario() -> int:
        async with pool_of(f"user_rewards:{name}", deadline_s=1.0, limits=AT_ONCE) as pool:
            with suppress(RewardFailed):
                await score_with(pool, {"offset": 0}, responses)
        return pool.calls_begun

    assert asyncio.run(scenario()) == made


def test_processes_that_user_code_started_are_killed_with_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    failure("forks_and_hangs", "a", prompt={"pid_file": str(pid_file)}, deadline_s=0.4)
    group = int(pid_file.read_text())
    _, alive = psutil.wait_procs(members_of(group), timeout=10)
    assert not alive


def members_of(group: int) -> list[psutil.Process]:
    found = list[psutil.Process]()
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (
            "broken_rewards:reward",
            r"broken_rewards.py:3 in <module>: ImportError: no module named grader",
        ),
        ("user_rewards:absent", "module user_rewards has no 'absent'"),
        ("user_rewards:PLAIN", "no 'PLAIN' that can be called, but a float"),
        ("starts_a_run:reward", r"starts_a_run.py starts a run when it is imported. Put the start"),
        ("ends_at_import:reward", r"ends_at_import.py:5 in <module>: SystemExit: 3"),
        ("no_such_module:reward", "no module no_such_module from"),
        ("user_rewards", "not of the form module:name"),
    ],
)
def test_a_target_that_cannot_be_imported_is_told_at_the_start(target: str, told: str) -> None:
    async def start() -> None:
        async with pool_of(target):
            pass

    with pytest.raises(RewardFailed, match=rf"reward_import_failed: .*{told}"):
        asyncio.run(start())


def test_no_child_outlives_a_worker_that_is_killed() -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(HERE)], stderr=subprocess.PIPE, text=True
    )
    assert worker.stderr is not None
    # What user code prints goes to the worker's standard error: both are in the middle of a call.
    try:
        children = [psutil.Process(int(worker.stderr.readline())) for _ in range(2)]
    finally:
        worker.kill()
        worker.wait()
        worker.stderr.close()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []


WORKER = """
import asyncio, sys
from pathlib import Path
from offbeat.environments.async_calls import CallLimits
from offbeat.environments.frames import RewardTarget
from offbeat.environments.killable import ChildPool

async def main():
    target = RewardTarget("user_rewards:announces_and_hangs", Path(sys.argv[1]), {}, 2048, 60.0, 120.0)
    pool = ChildPool(target, 2)
    await pool.start()
    await asyncio.gather(pool.call({}, ["hang"]), pool.call({}, ["hang"]))

asyncio.run(main())
"""


def test_the_example_reward_scores_its_example_rows() -> None:
    async def score(responses: Sequence[str]) -> list[Any]:
        example = HERE.parents[2] / "examples" / "rewards"
        pool = ChildPool(
            RewardTarget("digits:reward", example, {"near": 0.2}, 2048, 20.0, 120.0), 1
        )
        await pool.start()
        try:
            return await score_with(pool, {"prompt": "2+3=", "answer": 5}, responses)
        finally:
            await pool.close()

    assert asyncio.run(score(["5", "it is 6", "no"])) == [1.0, 0.2, 0.0]
