"""What ``offbeat check`` says of a reshard."""

import pytest

from offbeat.launch.checks.report import check_weight_sync
from offbeat.launch.checks.software import check_gpus
from offbeat.messages.finding import Finding, Level
from offbeat.plugins.reshard.checks import (
    Devices,
    MachinesApart,
    check_one_machine,
    check_wire,
)
from tests.support.recipes import get_only, make_config


def test_engines_that_need_whole_tensors_of_a_reshard_are_named() -> None:
    sync = {"transport": "reshard"}
    assert get_only(check_weight_sync(make_config(sync=sync), {})).level is Level.OK
    ranks = {"data_parallel": 2}
    for vllm, level, said in (
        ({"tensor_parallel": 2}, Level.OK, "fetches them from the trainer ranks"),
        ({"pipeline_parallel": 2}, Level.WARNING, "with generator.vllm.pipeline_parallel: each"),
        ({"expert_parallel": True}, Level.WARNING, "with generator.vllm.expert_parallel: each"),
        ({"engine_args": {"quantization": "fp8"}}, Level.WARNING, "engine_args.quantization"),
    ):
        served = {"backend": "vllm", "vllm": vllm}
        finding = get_only(
            check_weight_sync(make_config(sync=sync, generator=served, trainer=ranks), {})
        )
        assert (finding.level, said in finding.message) == (level, True)
    alone = get_only(check_weight_sync(make_config(sync=sync, generator={"backend": "vllm"}), {}))
    assert "a trainer of one rank sends whole tensors" in alone.message
    assert not list(check_weight_sync(make_config(), {}))
    assert not list(check_weight_sync(make_config(sync=sync, generator={"backend": "stub"}), {}))


OWN = {"device": "cuda", "gpus": 1}


def over(wire: str, devices: Devices | None, **environ: str) -> Finding:
    """What is found about a run of one rank and two engines."""
    sync = {"transport": "reshard", "wire": wire}
    run = make_config(sync=sync, trainer=OWN, generator=OWN | {"engines": 2})
    return get_only(check_wire(run, devices, environ))


def test_a_wire_between_devices_is_refused_where_there_are_none() -> None:
    finding = over("nccl", Devices("2.13.0+cpu", 0, has_nccl=False))
    assert finding.level is Level.ERROR
    assert "sync.wire=nccl carries device memory, but torch 2.13.0+cpu sees no" in finding.message
    assert "Set sync.wire to tcp" in finding.fix
    assert not list(check_wire(make_config(), None, {}))


def test_nccl_is_refused_without_its_library_and_with_fewer_devices_than_ends() -> None:
    assert "torch x has none" in over("nccl", Devices("x", 3, has_nccl=False)).message
    finding = get_only(check_gpus(make_config(trainer=OWN, generator=OWN | {"engines": 2}), 2))
    assert finding.level is Level.ERROR
    assert "3 asked for" in finding.message
    assert "2 found by torch" in finding.message


def test_a_wire_that_no_gpu_has_carried_is_warned_of() -> None:
    finding = over("nccl", Devices("x", 3, has_nccl=True))
    assert finding.level is Level.WARNING
    assert "has not been run on a GPU" in finding.message
    joined = over("cuda_ipc", Devices("x", 1, has_nccl=True), RAY_ADDRESS="head:6379")
    assert "a cluster in which several have GPUs is refused at the start" in joined.message


def test_a_cluster_of_several_gpu_machines_is_refused_for_a_wire_within_one() -> None:
    run = make_config(sync={"transport": "reshard", "wire": "cuda_ipc"}, trainer=OWN, generator=OWN)
    check_one_machine(run, ["10.0.0.1"])
    with pytest.raises(
        MachinesApart, match=r"2 of the cluster have GPUs: 10\.0\.0\.1, 10\.0\.0\.2"
    ):
        check_one_machine(run, ["10.0.0.1", "10.0.0.2"])
    check_one_machine(make_config(), ["10.0.0.1", "10.0.0.2"])
