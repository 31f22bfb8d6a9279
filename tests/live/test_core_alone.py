"""The core without any plug-in: with ``offbeat/plugins/`` moved away, the quickstart trains."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support.installed_package import install_package
from tests.support.warm_commands import WarmCommands

ROOT = Path(__file__).parents[2]
Said = Callable[..., subprocess.CompletedProcess[str]]
PROGRAM = """
import runpy
import sys

root, sys.argv = sys.argv[1], ["offbeat", *sys.argv[2:]]
sys.path[:] = [root, *sys.path, TESTS]  # the core is found before the tree around the tests
# An editable installation would find the folder that is moved away.
sys.meta_path[:] = [each for each in sys.meta_path if "ditable" not in repr(each)]
module = "offbeat" if sys.argv[1:] else "tests.support.warm_commands"
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("core")
    ignore = shutil.ignore_patterns("plugins", "__pycache__")
    shutil.copytree(ROOT / "offbeat", folder / "offbeat", ignore=ignore)
    (folder / "core.py").write_text(PROGRAM.replace("TESTS", repr(str(ROOT))))
    return folder


def offbeat(core: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the core."""
    command = [sys.executable, "core.py", str(core), *arguments]
    return subprocess.run(command, cwd=core, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def said(core: Path) -> Said:
    """What a command of the core says, in a process that has its modules already."""
    return partial(WarmCommands(["core.py", str(core)], core).run, core)


def test_the_quickstart_trains(core: Path, said: Said) -> None:
    recipe = ROOT / "recipes" / "quickstart.yaml"
    done = said("train", str(recipe), "--local", "steps=2", "run_dir=run")
    assert done.returncode == 0, done.stderr
    assert (core / "run" / "checkpoints" / "step_2" / "model.safetensors").exists()
    assert not (core / "run" / "wandb").exists()
    replayed = said("replay", "run")
    assert replayed.returncode == 0, replayed.stdout


def test_what_plugins_bring_is_unknown_and_nothing_else(said: Said) -> None:
    shown = said("--help").stdout
    assert "train" in shown and "simulate" not in shown
    done = said("report", "run")
    assert (done.returncode, "No such command 'report'" in done.stderr) == (2, True)
    recipe = str(ROOT / "recipes" / "quickstart.yaml")
    done = said("check", recipe, "wandb.mode=offline")
    assert (done.returncode, "{'mode': 'offline'}: unknown key" in done.stderr) == (2, True)
    done = said("dry-run", recipe, "sync.delta=true")
    assert done.returncode == 2
    assert "sync.delta=true: release_form delta: there is no plug-in with this name" in done.stderr
    assert "the entry point release_form.delta of offbeat.plugins" in done.stderr
    done = said("check", recipe, "sync.transport=reshard", "sync.wire=nccl")
    assert done.returncode == 2
    assert "sync.transport = 'reshard': has to be: object_store" in done.stderr
    assert "This installation lacks the plug-in reshard: reinstall offbeat." in done.stderr
    done = said("check", recipe, "sync.quantize=fp8_block")
    assert done.returncode == 2
    assert "sync.quantize = 'fp8_block': has to be: null" in done.stderr
    assert "This installation lacks the plug-in fp8_block: reinstall offbeat." in done.stderr
    for name in ("agent", "verifiers"):
        done = said("check", recipe, f"environment.name={name}")
        refusal = f"environment.name = '{name}': has to be: one of arithmetic, gsm8k"
        assert (done.returncode, refusal in done.stderr) == (2, True)
        assert f"This installation lacks the plug-in {name}: reinstall offbeat." in done.stderr
    done = said("check", recipe, "environment.episodes_per_child=2")
    assert (done.returncode, "only the processes of name=agent" in done.stderr) == (2, True)
    pictures = str(ROOT / "recipes" / "quickstart-images.yaml")
    done = said("dry-run", pictures)
    assert done.returncode == 2
    assert "environment.images = {'max_mib': 0.02}: unknown key" in done.stderr
    assert "This installation lacks the plug-in images: reinstall offbeat." in done.stderr
    assert "environment.name = 'digits': has to be: one of arithmetic, gsm8k" in done.stderr
    assert "This installation lacks the plug-in digits: reinstall offbeat." in done.stderr
    done = said("check", recipe, "generator.backend=vllm")
    assert done.returncode == 2
    assert "engine vllm: there is no plug-in with this name" in done.stderr
    assert (
        "Use one of embedded, stub, none, or install offbeat with its plug-in vllm" in done.stderr
    )


PLAYERS = """
from offbeat.config.environment_traits import EnvironmentTraits
from offbeat.environments.environment_plugin import PluginOfAgents


class Players(PluginOfAgents):
    traits = EnvironmentTraits("players.", makes_prompts=True, is_agent=True)

    def make_agent(self, section, working_dir, model_path):
        raise NotImplementedError


PLUGIN = Players()
"""


def test_agents_of_another_package_are_refused_where_nothing_plays_them(core: Path) -> None:
    install_package(core, "games", {"environment.players": PLAYERS})
    recipe = str(ROOT / "recipes" / "quickstart.yaml")
    done = offbeat(core, "check", recipe, "environment.name=players")
    assert done.returncode == 2
    assert (
        "environment.name=players is played by a plug-in: agents endpoint: there is no plug-in with this name"
        in (done.stderr)
    )


@pytest.mark.parametrize(
    ("key", "refused"),
    [
        ("trainer.backend=megatron", "'megatron': has to be: one of torch, stub"),
        ("trainer.encoder.data_parallel=1", "trainer.encoder = {'data_parallel': 1}: unknown key"),
        ("trainer.lora.rank=4", "trainer.lora = {'rank': 4}: unknown key"),
        ("trainer.lora.rank=4", "belongs to a plug-in that is not installed: reinstall offbeat"),
        (
            "trainer.tensor_parallel=2",
            "no plug-in that divides matrices over ranks of trainer.backend=torch",
        ),
    ],
)
def test_the_core_refuses_a_trainer_that_a_plugin_brings(
    said: Said, key: str, refused: str
) -> None:
    recipe = str(ROOT / "recipes" / "quickstart.yaml")
    done = said("check", recipe, key)
    assert done.returncode == 2
    assert refused in done.stderr


def test_a_broken_transport_is_named_with_its_error_and_breaks_nothing_else(core: Path) -> None:
    folder = core / "offbeat" / "plugins" / "reshard"
    folder.mkdir(parents=True)
    (folder / "plugin.py").write_text('raise RuntimeError("torn")')
    recipe = str(ROOT / "recipes" / "quickstart.yaml")
    done = offbeat(core, "check", recipe, "sync.transport=reshard")
    assert done.returncode == 2
    assert "transport reshard: its import fails with RuntimeError: torn" in done.stderr
    dried = offbeat(core, "dry-run", recipe, "steps=2", "run_dir=dry")
    assert dried.returncode == 0
    shutil.rmtree(core / "offbeat" / "plugins")
