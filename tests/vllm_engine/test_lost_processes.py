"""Engines of their own, killed: what their callers learn, and that no process is left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import psutil
import pytest
from faulty_llm import FaultyLlm
from outcomes import is_exact
from releases import TWO_CHUNKS, weights
from shared_engine import (
    FENCE,
    PATIENCE_S,
    Engine,
    TakenOver,
    ask,
    load,
    serve,
    spec_in,
    until,
)

from offbeat.generators.spec import EngineSpec
from offbeat.messages.failures import EngineUnavailable, OffbeatError
from offbeat.plugins.vllm.engine_actor import VllmEngineActor
from offbeat.plugins.vllm.server import start

HERE = Path(__file__).parent
NEVER_S: Final = 3600.0


def engine_processes(of: int) -> list[psutil.Process]:
    """Engine cores and their workers, of all engines of this owner."""
    return [child for child in _children(of) if "VLLM::" in _title(child)]


STRIKES: Final = (
    ("Worker", "update_weights", 0),
    ("EngineCore", "update_weights", 1),
    ("Worker", "finish_weight_update", 0),
)
"""Each chunk of a release of two, and the swap; each time somebody else's turn."""


@pytest.mark.timeout(600)  # four incarnations
def test_an_engine_killed_at_any_chunk_says_so_at_once_and_the_next_incarnation_is_exact(
    tmp_path: Path,
) -> None:
    """While samples run. Each next incarnation is the next victim. No deadline is waited for."""

    async def story() -> None:
        spec = spec_in(tmp_path, call_deadline_s=NEVER_S, heartbeat_deadline_s=NEVER_S)
        for strike in STRIKES:
            await killed_at(spec, *strike)
        last = Engine(spec)
        assert (await last.state(FENCE)).version is None
        await is_exact(last, await serve(last, 1, 1), 1)
        await last.close()

    asyncio.run(story())


async def killed_at(spec: EngineSpec, victim: str, call: str, turn: int) -> None:
    """One incarnation: without weights, exact, and killed before a call of a sync."""
    others = engine_processes(os.getpid())
    library, llm = start(spec)
    mine = [each for each in engine_processes(os.getpid()) if each not in others]
    struck_at = list[float]()

    async def strike() -> None:
        next(each for each in mine if victim in _title(each)).kill()
        struck_at.append(time.monotonic())

    faulty = FaultyLlm(llm)
    actor = TakenOver(spec, (library, faulty))
    assert (await actor.state(FENCE)).version is None
    await is_exact(actor, await serve(actor, 1, 0), 0)
    running = asyncio.ensure_future(ask(actor, "long", tokens=400))
    faulty.before[call, turn] = strike
    with pytest.raises(EngineUnavailable):
        await load(actor, 2, weights(1, TWO_CHUNKS).release)
    sys.stdout.write(f"{victim} killed at {call} {turn}: told after ")
    sys.stdout.write(f"{time.monotonic() - struck_at[0]:.2f} s\n")
    with pytest.raises(OffbeatError):
        await running
    await until(lambda: llm.errored)
    with pytest.raises(EngineUnavailable):
        await actor.state(FENCE)
    await VllmEngineActor.close(actor)
    _, alive = await asyncio.to_thread(psutil.wait_procs, mine, PATIENCE_S)
    assert not alive


OWNER = """
import asyncio, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from faulty_llm import FaultyLlm
from releases import weights
from shared_engine import load, serve, spec_in
from offbeat.plugins.vllm.engine_actor import VllmEngineActor
from offbeat.plugins.vllm.server import start

async def main():
    spec = spec_in(Path(sys.argv[1]))
    library, llm = start(spec)
    faulty = FaultyLlm(llm)
    actor = VllmEngineActor(spec, (library, faulty))
    await serve(actor, 1, 0)

    async def half_way():
        print("in mid-sync", flush=True)
        await asyncio.Event().wait()

    faulty.before["update_weights", 3] = half_way
    await load(actor, 2, weights(1).release)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["in mid-sync", "starting"])
def test_no_process_of_an_engine_outlives_an_actor_that_is_killed(
    tmp_path: Path, when: str
) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER.format(paths=[str(HERE), str(HERE.parents[1])]))
    owner = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    async def story() -> None:
        assert owner.stdout is not None
        wanted = 2 if when == "in mid-sync" else 1  # the core is there before its worker
        if when == "in mid-sync":
            while when not in (line := await asyncio.to_thread(owner.stdout.readline)):
                assert line, "the owner ended by itself"
        await until(lambda: len(engine_processes(owner.pid)) >= wanted)
        heirs = _children(owner.pid)
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        _, alive = await asyncio.to_thread(psutil.wait_procs, heirs, PATIENCE_S)
        assert not alive

    try:
        asyncio.run(story())
    finally:
        owner.kill()
        if owner.stdout is not None:
            owner.stdout.close()


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # or a zombie by now
        return ""


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
