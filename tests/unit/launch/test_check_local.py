"""What ``offbeat check``, ``dry-run`` and ``submit`` make of a run in one process."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.config.loader import load_recipe
from offbeat.config.run import RunConfig
from offbeat.launch.checks.machine import check_one_gpu, memory_needed_bytes
from offbeat.launch.checks.model_files import ModelFiles, read_model
from offbeat.launch.checks.software import check_one_process, check_packages, gpus_wanted
from offbeat.launch.commands.main import app
from offbeat.launch.dry_run import dry
from offbeat.messages.finding import Finding, Level

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"


def config(*overrides: str) -> RunConfig:
    return load_recipe(QUICKSTART, ["runtime=local", *overrides]).config


def test_ray_is_no_package_of_a_run_in_one_process() -> None:
    named = {finding.subject for finding in check_packages(config())}
    assert named == {finding.subject for finding in check_packages(config("runtime=ray"))} - {"ray"}


def test_a_cluster_that_the_run_does_not_join_is_named() -> None:
    (alone,) = check_one_process({})
    assert alone.level is Level.OK
    (ignored,) = check_one_process({"RAY_ADDRESS": "10.0.0.1:6379"})
    assert ignored.level is Level.WARNING
    assert "RAY_ADDRESS=10.0.0.1:6379 is not used" in ignored.message
    assert ignored.fix == "Leave runtime.backend out to run on that cluster."


@pytest.mark.parametrize(
    ("trainer", "generator", "gpus"), [("cpu", "cpu", 0), ("cuda", "cpu", 1), ("cuda", "cuda", 1)]
)
def test_a_process_uses_one_gpu_for_all_its_parts(trainer: str, generator: str, gpus: int) -> None:
    given = config(f"trainer.device={trainer}", f"generator.device={generator}")
    assert gpus_wanted(given) == gpus


def test_one_process_needs_less_memory_than_a_process_per_part() -> None:
    model = read_model(ROOT / "models" / "tiny-addition")[0]
    assert isinstance(model, ModelFiles)
    alone, on_ray = (memory_needed_bytes(each, model) for each in (config(), config("runtime=ray")))
    assert on_ray - alone == 3 * 600 * 2**20


SHARED = ("generator.share_weights=true", "sampler.name=in_order", "sampler.max_staleness=0")
ON_GPU = ("trainer.device=cuda", "generator.device=cuda")
BILLION = ModelFiles(10**9, 100, 1000, "")
COPY = 4 * BILLION.parameters


def test_shared_weights_are_counted_once_and_never_published() -> None:
    def weights(*overrides: str) -> int:
        given = config(*overrides)
        empty = ModelFiles(0, 0, 0, "")
        return memory_needed_bytes(given, BILLION) - memory_needed_bytes(given, empty)

    assert weights() == 6 * COPY, "weights, gradients, two moments; published; one engine"
    assert weights(*SHARED) == weights(*SHARED, "generator.engines=3") == 4 * COPY
    assert weights(*ON_GPU) == COPY, "the published ones"
    assert weights(*ON_GPU, *SHARED) == 0


def test_the_gpu_of_a_process_holds_trainer_and_engines() -> None:
    def check(gpu: int | None, *overrides: str, trained: int | None = None) -> list[Finding]:
        return [*check_one_gpu(config(*ON_GPU, *overrides), BILLION, gpu, trained)]

    assert [each.level for each in check(5 * COPY)] == [Level.OK]
    (refused,) = check(5 * COPY - 1)
    assert refused.level is Level.ERROR
    assert refused.fix.startswith("Use generator.share_weights=true, a smaller model")
    assert [each.level for each in check(4 * COPY, *SHARED)] == [Level.OK]
    (refused,) = check(4 * COPY - 1, *SHARED)
    assert refused.fix.startswith("Use a smaller model")
    assert [each.level for each in check(COPY, *SHARED, trained=0)] == [Level.OK]
    assert check(None) == check(COPY, "runtime=ray", "trainer.gpus=1", "generator.gpus=1") == []


@pytest.mark.plugins
def test_a_dry_run_in_one_process_replaces_what_needs_several() -> None:
    values = {
        "steps": 20,
        "model": {"path": "."},
        "runtime": {"backend": "local"},
        "trainer": {"data_parallel": 4},
        "generator": {"backend": "vllm"},
    }
    changed = dry(RunConfig.model_validate(values))
    assert (changed.generator.backend, changed.trainer.backend) == ("stub", "stub")


def test_a_run_in_one_process_is_not_submitted() -> None:
    refused = CliRunner().invoke(app, ["submit", str(QUICKSTART), "runtime=local"])
    assert refused.exit_code == 2
    assert refused.stderr == (
        "runtime.backend=local runs in one process, without Ray. Leave it out to submit the run, or "
        "start it here with offbeat train.\n"
    )
