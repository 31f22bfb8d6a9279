"""Settings that do not go together with ``sync.transport: reshard``."""

from typing import Any

import pytest

from tests.support.recipes import make_config, read_clashes


def problems(**sections: Any) -> list[str]:
    return read_clashes(make_config(**sections))


def messages(sync: dict[str, Any]) -> list[str]:
    return problems(sync=sync)


def test_the_defaults_go_together_over_a_reshard() -> None:
    assert messages({"transport": "reshard"}) == []


def test_a_sync_that_ends_before_a_lost_rank_s_buckets_can_be_sent_again() -> None:
    slow = {"transport": "reshard", "chunk_mib": 8, "slowest_mib_s": 4, "slack_s": 4}
    (text,) = messages(slow | {"deadline_s": 79})
    assert "sync.deadline_s=79 would pass" in text
    assert "four times the 20 s that a chunk may take" in text
    assert "Set sync.deadline_s to 80 or more" in text
    assert messages(slow | {"deadline_s": 80}) == []


def test_releases_of_adapters_are_not_resharded() -> None:
    (text,) = problems(sync={"transport": "reshard"}, trainer={"lora": {}})
    assert "trainer.lora trains adapters" in text
    assert "Set sync.transport to object_store." in text


SHARED = {"device": "cuda", "gpus": 0.4}
OWN = {"device": "cuda", "gpus": 1}


def over(wire: str, trainer: dict[str, Any], generator: dict[str, Any], **sync: Any) -> list[str]:
    sync = {"transport": "reshard", "wire": wire} | sync
    return problems(sync=sync, trainer=trainer, generator=generator)


def test_deltas_are_refused_over_wires_between_devices() -> None:
    assert problems(sync={"delta": True, "transport": "reshard"}) == []
    for wire, gpu in (("cuda_ipc", SHARED), ("nccl", OWN)):
        (text,) = over(wire, gpu, gpu, delta=True)
        assert f"sync.delta=true does not fit sync.wire={wire}" in text


def test_wires_between_devices_fit_gpus_that_are_shared_or_apart() -> None:
    assert over("cuda_ipc", SHARED, SHARED) == []
    assert over("nccl", OWN, OWN) == []
    assert over("nccl", OWN | {"data_parallel": 2}, OWN | {"engines": 3}) == []


@pytest.mark.parametrize("wire", ["cuda_ipc", "nccl"])
def test_a_wire_between_devices_needs_a_device_at_both_ends(wire: str) -> None:
    (text,) = over(wire, {}, OWN)
    assert f"sync.wire={wire} carries device memory, but trainer.device=cpu" in text
    (text,) = over(wire, OWN, {})
    assert "but generator.device=cpu. Set sync.wire to tcp" in text


def test_handles_of_memory_need_one_gpu_for_all() -> None:
    (text,) = over("cuda_ipc", SHARED, SHARED | {"engines": 2})
    assert "1 trainer ranks and 2 engines that reserve 1.2 GPUs together do not share one" in text
    assert "set sync.wire to nccl" in text


def test_nccl_needs_a_gpu_for_each() -> None:
    (text,) = over("nccl", OWN, SHARED)
    assert "sync.wire=nccl needs a separate GPU for every trainer rank and engine" in text
    assert "or sync.wire to cuda_ipc for one GPU" in text


@pytest.mark.parametrize(
    ("vllm", "key"),
    [
        ({"expert_parallel": True}, "generator.vllm.expert_parallel"),
        ({"engine_args": {"quantization": "fp8"}}, "generator.vllm.engine_args.quantization"),
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
