"""Measures what open episodes of an agent cost an environment worker: memory and descriptors.

All episodes are one group. Each asks the model once, and the engine answers nobody until all have:
then they are all open, with a connection each, and the processes are measured.

    python -m benchmarks.open_episodes --episodes 1000 --processes 16
"""

import argparse
import asyncio
import math
from pathlib import Path
from typing import Final, Self

import psutil
from transformers import AutoTokenizer

from benchmarks.endpoint import CHAT, MODEL
from offbeat.environments.frames import RewardTarget
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams
from offbeat.messages.groups import Prompt, RolloutTask
from offbeat.plugins.agents.endpoint.agent_groups import AgentGroups
from offbeat.plugins.agents.endpoint.bridges import TokenizerTemplate
from offbeat.plugins.agents.endpoint.session import SessionLimits
from offbeat.plugins.agents.endpoint.template_bridge import TemplateBridge
from offbeat.plugins.agents.factory import AgentFunction, playing
from offbeat.rollouts.calls import EngineClient
from offbeat.rollouts.samples import SampleFailurePolicy
from offbeat.testing.environments import make_result

ROOT: Final = Path(__file__).parents[1]
_MIB: Final = 1 << 20


def main() -> None:
    """Measure, and print a line before and a line while all episodes are open."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=16)
    options = parser.parse_args()
    asyncio.run(_measure(options.episodes, options.processes))


async def _measure(episodes: int, processes: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    tokenizer.chat_template = CHAT
    target = RewardTarget("benchmarks.one_call_agent:run", ROOT, {}, 2048, None, 120.0)
    agent = AgentFunction(target, processes, playing(math.ceil(episodes / processes)))
    bridge = TemplateBridge(TokenizerTemplate(tokenizer), {})
    groups, engine = AgentGroups(agent, bridge, SessionLimits()), _AllAtOnce(episodes)
    await groups.start()
    print(f"{'no episodes':20}", Footprint.now())
    task = RolloutTask(Prompt(0, 0, 0, {}), 1, episodes, "engine", seed=0, deadline_s=600.0)
    client = EngineClient(task, engine.generate, SamplingParams(max_new_tokens=1), 512)
    await groups.run_group(client, SampleFailurePolicy("fail_group"))
    print(f"{f'{episodes} open':20}", engine.footprint)
    await groups.close()


class Footprint:
    """Memory and open descriptors of this process and of its children."""

    def __init__(self, worker: psutil.Process, children: list[psutil.Process]) -> None:
        self._worker, self._worker_fds = worker.memory_full_info().uss, worker.num_fds()
        self._children = [each.memory_full_info().uss for each in children]
        self._most_fds = max(each.num_fds() for each in children)

    @classmethod
    def now(cls) -> Self:
        worker = psutil.Process()
        return cls(worker, worker.children())

    def __str__(self) -> str:
        return (
            f"worker {self._worker / _MIB:6.1f} MiB {self._worker_fds:5d} descriptors   "
            f"{len(self._children)} processes {sum(self._children) / _MIB:6.1f} MiB in all, "
            f"at most {self._most_fds} descriptors each"
        )


class _AllAtOnce:
    """An engine that answers nobody until so many requests are open."""

    def __init__(self, requests: int) -> None:
        self._open = asyncio.Barrier(requests)
        self.footprint: Footprint | None = None

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if await self._open.wait() == 0:
            self.footprint = Footprint.now()
        return make_result(request.request_id, [[7]], finish_reasons=("length",))


if __name__ == "__main__":
    main()
