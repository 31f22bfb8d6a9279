"""Agents that are programs: what they are given, and what counts as their result."""

import asyncio
import os
import resource
import sys
from pathlib import Path

import psutil
import pytest

from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.environments.factory import BadEnvironment
from offbeat.messages.failures import FailureKind, RolloutFailed
from offbeat.messages.generation import SamplingParams
from offbeat.messages.groups import Prompt, Receipt, RolloutTask
from offbeat.plugins.agents.factory import make_agent
from offbeat.rollouts.calls import EngineClient
from offbeat.rollouts.samples import TOO_FEW, SampleFailurePolicy
from tests.support.agent_endpoint import DrawnBytes, started_groups

HERE = Path(__file__).parent
TASK = RolloutTask(Prompt(7, 0, 7, {"question": "how many"}), 1, 1, "engine-0", 3, 60.0)


def play(
    *arguments: str,
    engine: DrawnBytes | None = None,
    left: Path | None = None,
    memory_mib: int | None = None,
) -> Receipt:
    """Play an episode; with ``left``, a second one, in which the process in this file has ended."""

    async def main() -> Receipt:
        command = (sys.executable, "program_agent.py", *arguments)
        recipe = EnvironmentConfig(name="agent", command=command, reward_memory_mib=memory_mib)
        agent = make_agent(recipe, HERE)
        async with started_groups(agent) as groups:
            generate = (engine or DrawnBytes()).generate
            client = EngineClient(TASK, generate, SamplingParams(max_new_tokens=40), 4000)
            receipt, _ = await groups.run_group(client, SampleFailurePolicy("mask"))
            if left is not None:
                earlier = int(left.read_text())
                await groups.run_group(client, SampleFailurePolicy("mask"))
                assert not _runs(earlier)
            return receipt

    return asyncio.run(main())


def test_a_program_is_trained_on_what_it_was_answered() -> None:
    engine = DrawnBytes()
    receipt = play("answers", engine=engine)
    ((_, said, _),) = engine.calls
    assert (receipt.rewards, receipt.valid_tokens) == ((1.0,), (len(said),))


def test_a_programs_address_space_is_limited_only_on_demand() -> None:
    inherited, _ = resource.getrlimit(resource.RLIMIT_AS)
    assert play("returns-its-memory-limit").rewards == (float(inherited >> 20),)
    assert play("returns-its-memory-limit", memory_mib=1024).rewards == (1024.0,)


def test_what_a_program_prints_is_no_result() -> None:
    assert play("prints").rewards == (1.0,)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing"], "(agent_no_result)"),
        (["writes-much"], "a result of more than 65536 bytes"),
        (["writes-text"], "a result that is not JSON"),
        (["exits", "3"], "ended with exit code 3"),
        (["starts-a-run"], "program_agent.py is the program of an agent and starts a run"),
    ],
)
def test_a_program_without_a_result_fails_its_sample(arguments: list[str], says: str) -> None:
    with pytest.raises(RolloutFailed) as caught:
        play(*arguments)
    assert (caught.value.kind, caught.value.reason) == (FailureKind.DATA, TOO_FEW)
    assert says in caught.value.detail


def test_a_failed_program_is_quoted_with_the_end_of_its_standard_error_alone() -> None:
    with pytest.raises(RolloutFailed) as caught:
        play("exits", "3")
    _, quoted = caught.value.detail.split("; the end of its standard error: ")
    assert r". \x1b[31mno key for the sandbox (agent_" in quoted and len(quoted) < 320


def test_what_a_program_writes_to_its_standard_error_cannot_steer_the_terminal(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(RolloutFailed):
        play("exits", "3")
    shown = capfd.readouterr().err
    assert r"\x1b[31mno key for the sandbox" in shown
    assert "\x1b" not in shown


def test_a_program_may_say_that_its_sandbox_is_out_of_service() -> None:
    with pytest.raises(RolloutFailed) as caught:
        play("exits", str(os.EX_TEMPFAIL))
    assert caught.value.kind is FailureKind.INFRASTRUCTURE


def test_what_a_program_leaves_running_is_killed_with_its_episode(tmp_path: Path) -> None:
    left = tmp_path / "pid"
    assert play("leaves-a-process", str(left), left=left).rewards == (1.0,)


def test_a_program_inherits_no_variable_that_is_not_named() -> None:
    name = next(name for name in os.environ if name.startswith("PYTEST"))
    assert play("sees", name).rewards == (0.0,)
    assert play("sees", "PYTHONPATH").rewards == (0.0,)
    assert play("sees", "OPENAI_API_KEY").rewards == (1.0,)


def test_a_program_that_is_not_there_is_refused_before_anything_starts() -> None:
    for name in ("./no-such-program", "no-such-program"):
        with pytest.raises(BadEnvironment, match="no-such-program' is not a program, from "):
            make_agent(EnvironmentConfig(name="agent", command=(name,)), HERE)


def _runs(pid: int) -> bool:
    """Say whether a process runs; one that was killed may wait for its parent to notice."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
