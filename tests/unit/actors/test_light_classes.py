"""Ray imports the class of an actor in each process that gets a handle to it."""

import pkgutil
import subprocess
import sys

import offbeat.actors

MODULES = [f"offbeat.actors.{each.name}" for each in pkgutil.iter_modules(offbeat.actors.__path__)]


def test_a_process_that_gets_a_handle_of_an_actor_loads_no_torch() -> None:
    assert "offbeat.actors.engine_actor" in MODULES
    script = (
        f"import {', '.join(MODULES)}, sys\n"
        "print(*({'torch', 'transformers', 'megatron', 'vllm', 'wandb'} & set(sys.modules)))"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert told.stdout.split() == []
