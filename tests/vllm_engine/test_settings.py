"""From a recipe to vLLM's arguments, without starting an engine."""

from pathlib import Path
from typing import Any

import pytest
from shared_engine import spec_in

from offbeat.config.run import RunConfig
from offbeat.messages.finding import Level
from offbeat.messages.generation import GenerateRequest, SamplingParams
from offbeat.plugins.vllm.arguments import (
    check_engine_args,
    collect_fields,
    engine_arguments,
    logprobs_mode,
)
from offbeat.plugins.vllm.checks import check_vllm
from offbeat.plugins.vllm.errors import EngineArgsRefused
from offbeat.plugins.vllm.lazy_import import load_library
from offbeat.plugins.vllm.outputs import sampling_arguments
from offbeat.plugins.vllm.section import VllmGeneratorConfig
from offbeat.plugins.vllm.server import prepare_environment
from offbeat.plugins.vllm.workarounds import WORKAROUNDS


def recipe(**engine_args: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "steps": 1,
            "model": {"path": "m"},
            "generator": {"backend": "vllm", "vllm": {"engine_args": engine_args}},
        }
    )


def test_every_argument_we_set_exists_in_the_installed_vllm(tmp_path: Path) -> None:
    known = collect_fields(load_library().AsyncEngineArgs)
    assert engine_arguments(spec_in(tmp_path)).keys() <= known.keys()


def test_every_argument_of_a_request_exists_in_the_installed_vllm() -> None:
    sampling = SamplingParams(top_k=3, min_p=0.1, stop=("x",), seed=1)
    arguments = sampling_arguments(GenerateRequest("r", (1, 2), 2, sampling), end_ids=(9,))
    params = load_library().SamplingParams(**arguments)
    assert (params.top_k, params.min_p, params.stop) == (3, 0.1, ["x"])


def test_the_recipe_sets_further_arguments_and_parallel_sizes(tmp_path: Path) -> None:
    spec = spec_in(
        tmp_path,
        tensor_parallel=2,
        pipeline_parallel=3,
        expert_parallel=True,
        engine_args={"block_size": 32, "enable_prefix_caching": False},
    )
    arguments = engine_arguments(spec)
    assert (arguments["tensor_parallel_size"], arguments["pipeline_parallel_size"]) == (2, 3)
    assert arguments["enable_expert_parallel"]
    assert (arguments["block_size"], arguments["enable_prefix_caching"]) == (32, False)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("enforce_eagre", "Did you mean enforce_eager?"),
        ("xyzzy", "is not an argument of this vLLM"),
        ("worker_extension_cls", "is set by this package"),
    ],
)
def test_an_argument_that_cannot_be_set_is_refused_with_what_to_do(name: str, said: str) -> None:
    known = collect_fields(load_library().AsyncEngineArgs)
    with pytest.raises(EngineArgsRefused, match=said) as refused:
        check_engine_args({name: 1}, known)
    assert refused.value.args == (name, refused.value.problem, refused.value.fix)


def test_check_says_which_vllm_it_is_and_what_is_wrong_with_its_arguments() -> None:
    good = list(check_vllm(recipe(enforce_eager=True)))
    assert [each.level for each in good] == [Level.OK, Level.OK]
    bad = list(check_vllm(recipe(enforce_eagre=True)))
    assert [each.level for each in bad] == [Level.OK, Level.ERROR]
    assert "enforce_eager" in bad[-1].fix


@pytest.mark.parametrize(
    ("temperature", "mode"), [(1.0, "raw_logprobs"), (0.7, "processed_logprobs")]
)
def test_logprobs_are_taken_where_they_are_of_the_recipes_temperature(
    temperature: float, mode: str
) -> None:
    sampling = {"temperature": temperature}
    config = VllmGeneratorConfig.model_validate({"backend": "vllm", "sampling": sampling})
    assert logprobs_mode(config) == mode


def test_what_is_set_in_the_environment_stays_but_for_the_recipes_threads() -> None:
    environ = {"VLLM_HOST_IP": "10.0.0.1", "OMP_NUM_THREADS": "1"}
    prepare_environment(VllmGeneratorConfig(threads=3), environ)
    assert environ["VLLM_HOST_IP"] == "10.0.0.1"
    assert environ["OMP_NUM_THREADS"] == "3"
    assert environ["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_a_gpu_engine_gets_no_settings_of_the_cpu_build() -> None:
    environ: dict[str, str] = {}
    prepare_environment(VllmGeneratorConfig(device="cuda", gpus=1), environ)
    assert not {name for name in environ if "CPU" in name or "OMP" in name or "GLOO" in name}


def test_prompts_are_prefilled_whole_on_a_cpu_unless_the_recipe_says_otherwise(
    tmp_path: Path,
) -> None:
    assert engine_arguments(spec_in(tmp_path))["enable_chunked_prefill"] is False
    asked = spec_in(tmp_path, engine_args={"enable_chunked_prefill": True})
    assert engine_arguments(asked)["enable_chunked_prefill"] is True


def test_each_workaround_is_marked_where_its_code_is() -> None:
    package = Path(engine_arguments.__code__.co_filename).parent
    code = "\n".join(file.read_text() for file in package.glob("*.py"))
    for each in WORKAROUNDS:
        assert f"work-around: {each.name}" in code, each.name
        assert each.applies_to("0.31.0")
        assert not each.applies_to("0.34.1")
