"""The agents of an environment worker without Ray: its engine is a function of this process."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from offbeat.config.run import RunConfig
from offbeat.environments.factory import BadEnvironment
from offbeat.messages.fences import Fence
from offbeat.rollouts.worker import EnvironmentSpec, EnvironmentWorker
from offbeat.run_files.sharing import WriteLocation
from tests.support.agent_endpoint import CHATML, DrawnBytes
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.environment_fakes import task
from tests.support.environment_workers import only

HERE = Path(__file__).parent
FENCE = Fence("run", 1)


def test_a_process_that_runs_a_worker_and_its_agents_needs_no_ray() -> None:
    script = (
        "import sys\n"
        "sys.modules['ray'] = None\n"  # an import of it raises
        "import offbeat.rollouts.worker, offbeat.plugins.agents.endpoint.agent_groups\n"
        "import offbeat.plugins.agents.endpoint.agent_groups, offbeat.plugins.agents.endpoint.bridges\n"
        "print(*({'torch', 'transformers', 'pyarrow'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stdout.split()) == (0, []), ended.stderr


def agent_worker(
    run_dir: Path, tokenizer: PreTrainedTokenizerFast, engine: DrawnBytes
) -> EnvironmentWorker:
    """A worker of an agent, on an engine that draws bytes."""
    tokenizer.save_pretrained(run_dir / "model")
    config = RunConfig.model_validate(
        {
            "steps": 1,
            "model": {"path": str(run_dir / "model")},
            "environment": {"name": "agent", "target": "user_agents:converses"},
            "data": {"path": "tasks.jsonl"},
            "generator": {"max_model_len": 4000, "sampling": {"max_new_tokens": 20}},
        }
    )
    spec = EnvironmentSpec("environment-0", config, str(HERE), str(run_dir))
    return EnvironmentWorker(spec, WriteLocation(run_dir), only(engine.generate))


def test_a_worker_plays_an_agent_and_closes_its_endpoint_and_its_processes(tmp_path: Path) -> None:
    async def main() -> None:
        tokenizer, engine = byte_tokenizer(), DrawnBytes()
        tokenizer.chat_template = CHATML
        worker = agent_worker(tmp_path, tokenizer, engine)
        worker.admit(FENCE)
        receipt, columns = await worker.roll_out(task({"question": "how many"}, samples=3))
        assert receipt.turns == (2, 2, 2)
        assert int(columns["loss_mask"].sum()) == sum(len(ids) for _, ids, _ in engine.calls)
        await worker.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_an_agent_needs_a_chat_template(tmp_path: Path) -> None:
    with pytest.raises(BadEnvironment, match="needs a tokenizer with a chat template"):
        agent_worker(tmp_path, byte_tokenizer(), DrawnBytes())
