"""Settings of vLLM's engines that cannot work; vLLM is not needed to say so."""

from typing import Any

import pytest

from tests.support.recipes import make_config, read_clashes


def found(generator: dict[str, Any], *, dry_run: bool = False) -> list[str]:
    config = make_config(
        environment={"name": "arithmetic"}, generator={"backend": "vllm", **generator}
    )
    return read_clashes(config, dry_run=dry_run)


def test_vllm_is_a_backend() -> None:
    assert found({}) == []


def test_an_engine_of_one_device_may_share_it() -> None:
    assert found({"device": "cuda", "gpus": 0.5}) == []
    assert found({"device": "cuda", "gpus": 0.5, "vllm": {"tensor_parallel": 2}})


def test_filters_at_temperature_1_and_other_temperatures_without_filters_fit_vllm() -> None:
    assert found({"sampling": {"top_p": 0.9, "top_k": 20, "min_p": 0.05, "stop": ["x"]}}) == []
    assert found({"sampling": {"temperature": 0.7, "stop": ["x"]}}) == []


@pytest.mark.parametrize(
    ("generator", "said"),
    [
        (
            {"vllm": {"engine_args": {"max_num_seqs": 8}}},
            "engine_args.max_num_seqs=8 has a separate key. Set generator.max_sequences instead.",
        ),
        (
            {"vllm": {"engine_args": {"enable_lora": True}}},
            (
                "engine_args.enable_lora=True belongs to vLLM's LoRA support, which stays off: engines add adapters "
                "to the weights they loaded (docs/lora.md). Leave enable_lora out: trainer.lora trains"
            ),
        ),
        (
            {"vllm": {"engine_args": {"max_loras": 2}}},
            "engine_args.max_loras=2 belongs to vLLM's LoRA",
        ),
        ({"vllm": {"engine_args": {"max_lora_rank": 8}}}, "max_lora_rank=8 belongs to vLLM's LoRA"),
        ({"vllm": {"engine_args": {"lora_modules": ["a=b"]}}}, "Leave lora_modules out"),
        (
            {"device": "cuda", "gpus": 1, "vllm": {"tensor_parallel": 4}},
            "generator.gpus=1 does not fit an engine of 4 devices. Set generator.gpus to 4.",
        ),
        (
            {"vllm": {"engine_args": {"distributed_executor_backend": "ray"}}},
            (
                "engine_args.distributed_executor_backend=ray does not fit the weight sync, which hands weights "
                "to the workers of an engine through memory of one machine. Leave distributed_executor_backend "
                "out, and set"
            ),
        ),
        ({"vllm": {"engine_args": {"nnodes": 2}}}, "engine_args.nnodes=2 does not fit"),
        (
            {"sampling": {"temperature": 0.7, "top_p": 0.9}},
            (
                "top_p=0.9 with generator.sampling.temperature=0.7 has no usable logprobs in vLLM: they are "
                "either of temperature 1, or of the distribution that top_p has cut. Set top_p to 1 or the "
                "temperature to 1."
            ),
        ),
        (
            {"sampling": {"temperature": 0.7, "top_k": 20}},
            "top_k=20 with generator.sampling.temperature=0.7 has no usable logprobs in vLLM",
        ),
        (
            {"sampling": {"temperature": 0.7, "min_p": 0.05}},
            "that min_p has cut. Set min_p to 0 or the temperature to 1.",
        ),
        (
            {"sampling": {"temperature": 1e-3}},
            "temperature=0.001 is below 0.01, at which vLLM samples instead",
        ),
    ],
)
def test_a_setting_that_cannot_work_says_what_to_set(generator: dict[str, Any], said: str) -> None:
    (text,) = found(generator)
    assert said in text
    assert found(generator, dry_run=True) == []
