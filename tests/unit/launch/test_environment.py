"""Environment variables on their way to the actors of other machines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.config.loader import load_recipe
from offbeat.config.problems import ConfigError
from offbeat.config.run import RunConfig
from offbeat.config.yaml_text import to_yaml
from offbeat.launch.dry_run import dry
from offbeat.launch.environment import pass_on_variables
from offbeat.telemetry.logs import Redactor

MINIMAL = {"steps": 1, "model": {"path": "m"}}
SECRET = "hf_abcdefghij"


def config(**env: object) -> RunConfig:
    return RunConfig.model_validate({**MINIMAL, "runtime": {"env": env}})


def test_what_matters_of_the_drivers_environment_is_passed_on_and_the_recipe_wins() -> None:
    environ = {"HF_HOME": "/a", "NCCL_DEBUG": "WARN", "PATH": "/bin", "HOME": "/root"}
    passed = pass_on_variables(environ, config(NCCL_DEBUG="INFO", MINE=4).runtime.env)
    assert passed.plain == {"HF_HOME": "/a", "NCCL_DEBUG": "INFO", "MINE": "4"}
    assert passed.secret == {}


@pytest.mark.plugins
@pytest.mark.parametrize(
    "name",
    [
        "HF_HOME",
        "HUGGINGFACE_HUB_CACHE",
        "XDG_CACHE_HOME",
        "TORCH_HOME",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "VLLM_CACHE_ROOT",
        "CUDA_CACHE_PATH",
        "PYTORCH_CUDA_ALLOC_CONF",  # memory of a rank elsewhere would be cut otherwise
        "PYTORCH_ALLOC_CONF",
        "NCCL_SOCKET_IFNAME",
        "GLOO_SOCKET_IFNAME",
        "FI_PROVIDER",  # EFA would fall back to sockets otherwise
        "UCX_TLS",
        "LD_LIBRARY_PATH",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "NVTE_FLASH_ATTN",
        "DG_JIT_CACHE_DIR",
        "FLASHINFER_WORKSPACE_BASE",
    ],
)
def test_caches_allocators_and_interfaces_are_the_same_on_every_machine(name: str) -> None:
    assert pass_on_variables({name: "/a"}, {}).plain == {name: "/a"}


def test_devices_and_places_of_this_machine_alone_are_not_passed_on() -> None:
    own = {"CUDA_VISIBLE_DEVICES": "0", "HOME": "/a", "TMPDIR": "/b"}
    assert pass_on_variables(own, {}).plain == {}


@pytest.mark.plugins
def test_a_secret_is_no_part_of_what_ray_shows() -> None:
    environ = {"HF_TOKEN": SECRET, "WANDB_API_KEY": "k" * 40, "GITHUB_TOKEN": "not ours"}
    passed = pass_on_variables(environ, config(DB_PASSWORD="canary-1").runtime.env)
    assert passed.plain == {}
    assert set(passed.secret) == {"HF_TOKEN", "WANDB_API_KEY", "DB_PASSWORD"}
    assert "canary" not in repr(passed) and SECRET not in repr(passed)


def test_what_a_ray_job_sets_is_left_to_it() -> None:
    """Ray refuses a name that both say."""
    job = json.dumps({"runtime_env": {"env_vars": {"HF_HOME": "/job"}}})
    environ = {"HF_HOME": "/job", "HF_HUB_OFFLINE": "1", "RAY_JOB_CONFIG_JSON_ENV_VAR": job}
    assert pass_on_variables(environ, {}).plain == {"HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize("job", ["", "{", "[]", "null", '{"runtime_env": 3}'])
def test_a_job_that_says_nothing_of_variables_hinders_none(job: str) -> None:
    environ = {"HF_HOME": "/a", "RAY_JOB_CONFIG_JSON_ENV_VAR": job}
    assert pass_on_variables(environ, {}).plain == {"HF_HOME": "/a"}


def test_a_secret_of_the_recipe_reaches_neither_its_copy_nor_a_log() -> None:
    told = config(HF_TOKEN=SECRET, HF_HOME="/cache")
    written = to_yaml(told, {})
    assert SECRET not in written and "HF_HOME: /cache" in written
    assert SECRET not in Redactor.from_environment({}, told)(f"refused: {SECRET}")


@pytest.mark.parametrize(
    "env", ["{RAY_ADDRESS: auto}", "{a b: x}", "{'A=B': x}", "{A: null}", "{A: [1]}", "text"]
)
def test_what_is_no_variable_is_refused_by_its_key(tmp_path: Path, env: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"steps: 1\nmodel: {{path: m}}\nruntime: {{env: {env}}}\n")
    with pytest.raises(ConfigError, match=r"runtime\.env"):
        load_recipe(recipe, ())


def test_a_dry_run_has_the_same_variables() -> None:
    assert dry(config(HF_HOME="/a")).runtime.env == {"HF_HOME": "/a"}


def test_a_value_is_the_text_that_is_written(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("steps: 1\nmodel: {path: m}\nruntime: {env: {A: 007, B: yes, C: 1e3}}\n")
    loaded = load_recipe(recipe, ["runtime.env.D=0x1F"])
    assert loaded.config.runtime.env == {"A": "007", "B": "yes", "C": "1e3", "D": "0x1F"}


def test_an_override_sets_one(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("steps: 1\nmodel: {path: m}\nruntime: {env: {OMP_NUM_THREADS: 4}}\n")
    loaded = load_recipe(recipe, ["runtime.env.HF_HOME=/cache"])
    assert loaded.config.runtime.env == {"OMP_NUM_THREADS": "4", "HF_HOME": "/cache"}


def test_a_library_that_was_imported_before_shows_no_bars_either() -> None:
    program = """
from transformers.utils import logging
from offbeat.launch.process_environment import set_environment
print(logging.is_progress_bar_enabled())
set_environment({})
print(logging.is_progress_bar_enabled())
"""
    unset = {name: value for name, value in os.environ.items() if "PROGRESS_BARS" not in name}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=unset
    )
    assert done.stdout == "True\nFalse\n"
