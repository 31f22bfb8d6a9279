"""What a recipe with ``sync.transport: reshard`` becomes in a dry run, and what it asks of a machine."""

from typing import Any

from offbeat.launch.checks.machine import Machine, check_shared_memory, memory_needed_bytes
from offbeat.launch.checks.model_files import ModelFiles
from offbeat.launch.dry_run import dry
from tests.support.recipes import make_config

GIB = 2**30
MACHINE = Machine(
    cores=2, memory_bytes=8 * GIB, memory_free_bytes=4 * GIB, shared_memory_bytes=4 * GIB
)


def test_a_dry_run_needs_no_device_for_its_wire() -> None:
    run = make_config(sync={"transport": "reshard", "wire": "nccl"})
    assert dry(run).sync.model_dump()["wire"] == "tcp"


def test_a_dry_run_in_one_process_sends_through_memory() -> None:
    run = make_config(
        runtime={"backend": "local"},
        sync={"transport": "reshard", "interval": 2},
        trainer={"data_parallel": 4},
        generator={"backend": "vllm"},
    )
    changed = dry(run)
    assert (changed.sync.transport, changed.sync.interval) == ("object_store", 2)


def test_the_base_of_a_delta_is_counted_in_the_engine_alone() -> None:
    def weights(**values: Any) -> int:
        model, none = ModelFiles(10**10, 4 * 10**10, None, "x"), ModelFiles(0, 0, 0, "")
        run = make_config(**values)
        return memory_needed_bytes(run, model) - memory_needed_bytes(run, none)

    more = weights(sync={"delta": True, "transport": "reshard"}) - weights()
    assert more == 4 * 10**10, "the trainer has a snapshot anyway"


def test_a_release_that_ranks_send_needs_no_object_store() -> None:
    model = ModelFiles(10**9, 4 * 10**9, None, "x")  # 3.7 GiB; the store of MACHINE has 2.4 GiB
    (stored,) = check_shared_memory(make_config(), MACHINE, model)
    assert "each release" in stored.message
    (sent,) = check_shared_memory(make_config(sync={"transport": "reshard"}), MACHINE, model)
    assert "each release" not in sent.message
