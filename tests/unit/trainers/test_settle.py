"""What is left of a pass through a sharded model that fails."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from offbeat.trainers.torch.sharding import settle


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_model_whose_first_pass_fails_before_it_begins_is_settled_and_computes(
    mesh: DeviceMesh,
) -> None:
    """torch has nothing to reset then, and raised an error of its own in the place of the pass's."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    settle(model, failed=True)
    model(torch.ones(2, 4)).sum().backward()
    settle(model, failed=True)
    assert all(each.grad is not None for each in model.parameters())
