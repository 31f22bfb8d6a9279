"""What is left of a pass through a sharded model that fails."""

from collections.abc import Iterator
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from offbeat.trainers.torch.sharding import own, reset_after_error
from offbeat.trainers.torch_versions import refuse_sharding

pytestmark = pytest.mark.skipif(
    refuse_sharding(torch.__version__) is not None, reason="this torch shards no model"
)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(mesh: DeviceMesh) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fail() -> NoReturn:
    raise ZeroDivisionError


def test_a_model_whose_first_pass_fails_before_it_begins_computes_afterwards(
    mesh: DeviceMesh,
) -> None:
    """torch has nothing to reset then, and raised an error of its own in the place of the pass's."""
    model = sharded(mesh)
    with pytest.raises(ZeroDivisionError), reset_after_error(model):
        fail()
    model(torch.ones(2, 4)).sum().backward()
    assert all(each.grad is not None for each in model.parameters())


def test_gradients_of_a_step_outlast_a_later_pass_that_fails(mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    model(torch.ones(2, 4)).sum().backward()
    before = [own(each.grad).clone() for each in model.parameters() if each.grad is not None]
    with pytest.raises(RuntimeError, match="shapes"), reset_after_error(model), torch.no_grad():
        model(torch.ones(2, 5))
    after = [own(each.grad) for each in model.parameters() if each.grad is not None]
    assert len(before) == len(after) == 4
    assert all(map(torch.equal, before, after))
    model(torch.ones(2, 4)).sum().backward()
    assert all(torch.equal(own(each), 2 * old) for each, old in zip(after, before, strict=True))
