"""Settings of the weight sync that cannot work together."""

from typing import Any

import pytest

from offbeat.config.crosschecks import clashes
from offbeat.config.run import RunConfig

BFLOAT16: dict[str, Any] = {"model": {"path": "tiny", "dtype": "bfloat16"}}


def messages(sync: dict[str, Any], **model: str) -> list[str]:
    values: dict[str, Any] = {"steps": 2, "model": {"path": "tiny"} | model, "sync": sync}
    found = clashes(RunConfig.model_validate(values))
    return [f"{clash.message}. {clash.hint}" for clash in found]


def test_the_defaults_go_together_on_every_transport() -> None:
    for transport in ("object_store", "reshard"):
        assert messages({"transport": transport}) == []


def test_a_sync_that_ends_before_a_lost_rank_s_buckets_can_be_sent_again() -> None:
    slow = {"transport": "reshard", "chunk_mib": 8, "slowest_mib_s": 4, "slack_s": 4}
    (text,) = messages(slow | {"deadline_s": 79})
    assert "sync.deadline_s=79 would be over" in text
    assert "four times the 20 s a chunk may take" in text
    assert "Set sync.deadline_s to 80 or more" in text
    assert messages(slow | {"deadline_s": 80}) == []


def test_releases_of_adapters_are_not_resharded() -> None:
    (text,) = adapters(sync={"transport": "reshard"}, trainer={"lora": {}})
    assert "trainer.lora trains adapters" in text
    assert "Set sync.transport to object_store." in text


def test_embedded_engines_serve_the_type_of_the_model() -> None:
    (text,) = messages({"wire_dtype": "bfloat16"})
    assert "sync.wire_dtype=bfloat16 does not fit generator.backend=embedded" in text
    assert messages({"wire_dtype": "float32"}) == []
    assert messages({"wire_dtype": "bfloat16"}, dtype="bfloat16") == []


def test_quantized_releases_are_for_engines_that_compute_with_them() -> None:
    (text,) = adapters(sync={"quantize": "fp8_block"}, **BFLOAT16)
    assert "sync.quantize=fp8_block does not fit generator.backend=embedded" in text
    assert "or set generator.backend to vllm." in text
    vllm = {"backend": "vllm"}
    assert adapters(sync={"quantize": "fp8_block"}, generator=vllm, **BFLOAT16) == []
    (text,) = adapters(sync={"quantize": "fp8_block"}, generator=vllm)
    assert "they serve float32. Set sync.wire_dtype to bfloat16" in text
    both = {"quantize": "fp8_block", "wire_dtype": "bfloat16"}
    assert adapters(sync=both, generator=vllm) == []
    (text,) = adapters(sync=both, generator=vllm, trainer={"lora": {}})
    assert "trainer.lora sends unrounded" in text


def test_quantized_releases_for_embedded_engines_are_one_problem_whose_fixes_work() -> None:
    (text,) = adapters(sync={"quantize": "fp8_block"})
    assert (
        "Leave sync.quantize out, or set generator.backend to vllm and sync.wire_dtype to bfloat16."
        in text
    )
    assert adapters() == []
    fixed = {"quantize": "fp8_block", "wire_dtype": "bfloat16"}
    assert adapters(sync=fixed, generator={"backend": "vllm"}) == []


@pytest.mark.parametrize("key", ["quantization", "hf_overrides", "load_format"])
def test_what_quantize_sets_of_vllm_is_set_once(key: str) -> None:
    vllm = {"backend": "vllm", "vllm": {"engine_args": {key: "x"}}}
    (text,) = adapters(sync={"quantize": "fp8_block"}, generator=vllm, **BFLOAT16)
    assert f"sets {key} of vLLM" in text


def test_other_quantizations_are_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match="fp8_block"):
        messages({"quantize": "mxfp8"})


@pytest.mark.parametrize("transport", ["nccl", ""])
def test_a_transport_that_does_not_exist_is_refused(transport: str) -> None:
    with pytest.raises(ValueError, match="object_store"):
        messages({"transport": transport})


def adapters(**values: Any) -> list[str]:
    given: dict[str, Any] = {"steps": 2, "model": {"path": "tiny"}} | values
    return [f"{each.message}. {each.hint}" for each in clashes(RunConfig.model_validate(given))]


def test_a_merged_release_needs_adapters_to_merge() -> None:
    (text,) = adapters(sync={"adapter": "merged"})
    assert "sync.adapter=merged has nothing to merge" in text
    assert adapters(sync={"adapter": "merged"}, trainer={"lora": {}}) == []
    assert adapters(trainer={"lora": {}}) == []


def test_releases_of_adapters_fit_every_kind_of_engine() -> None:
    for generator in ({"backend": "vllm"}, {"backend": "embedded"}):
        for adapter in ("separate", "merged"):
            given: dict[str, Any] = {"generator": generator, "sync": {"adapter": adapter}}
            assert adapters(trainer={"lora": {}}, **given) == []


def test_adapters_on_megatron_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"trainer\.megatron\.lora"):
        adapters(trainer={"backend": "megatron", "lora": {}})


def test_deltas_are_refused_of_adapters_and_over_wires_between_devices() -> None:
    for transport in ("object_store", "reshard"):
        assert adapters(sync={"delta": True, "transport": transport}) == []
    for wire, gpu in (("cuda_ipc", SHARED), ("nccl", OWN)):
        (text,) = over(wire, gpu, gpu, delta=True)
        assert f"sync.delta=true does not fit sync.wire={wire}" in text
    (text,) = adapters(sync={"delta": True}, trainer={"lora": {}})
    assert "sync.delta=true saves nothing with trainer.lora" in text


SHARED = {"device": "cuda", "gpus": 0.4}
OWN = {"device": "cuda", "gpus": 1}


def over(wire: str, trainer: dict[str, Any], generator: dict[str, Any], **sync: Any) -> list[str]:
    sync = {"transport": "reshard", "wire": wire} | sync
    return adapters(sync=sync, trainer=trainer, generator=generator)


def test_wires_between_devices_fit_gpus_that_are_shared_or_apart() -> None:
    assert over("cuda_ipc", SHARED, SHARED) == []
    assert over("nccl", OWN, OWN) == []
    assert over("nccl", OWN | {"data_parallel": 2}, OWN | {"engines": 3}) == []


@pytest.mark.parametrize("wire", ["cuda_ipc", "nccl"])
def test_a_wire_between_devices_needs_a_device_at_both_ends(wire: str) -> None:
    (text,) = over(wire, {}, OWN)
    assert f"sync.wire={wire} carries device memory, and trainer.device=cpu" in text
    (text,) = over(wire, OWN, {})
    assert "and generator.device=cpu. Set sync.wire to tcp" in text


def test_handles_of_memory_need_one_gpu_for_all() -> None:
    (text,) = over("cuda_ipc", SHARED, SHARED | {"engines": 2})
    assert "1 trainer ranks and 2 engines that reserve 1.2 GPUs together do not share one" in text
    assert "set sync.wire to nccl" in text


def test_nccl_needs_a_gpu_for_each() -> None:
    (text,) = over("nccl", OWN, SHARED)
    assert "sync.wire=nccl needs a GPU of its own for every trainer rank and engine" in text
    assert "or sync.wire to cuda_ipc for one GPU" in text


@pytest.mark.parametrize(
    ("vllm", "key"),
    [
        ({"expert_parallel": True}, "generator.vllm.expert_parallel"),
        ({"engine_args": {"quantization": "fp8"}}, "generator.vllm.engine_args"),
    ],
)
def test_vllm_workers_without_a_recorded_layout_receive_over_tcp_alone(
    vllm: dict[str, Any], key: str
) -> None:
    texts = over("nccl", OWN, OWN | {"backend": "vllm", "vllm": vllm})
    (text,) = [each for each in texts if "ends in the workers" in each]
    assert f"{key} has none. Set sync.wire to tcp" in text
    assert over("nccl", OWN, OWN | {"backend": "vllm"}) == []


def test_only_a_reshard_has_a_wire() -> None:
    with pytest.raises(ValueError, match="wire"):
        messages({"transport": "object_store", "wire": "nccl"})
