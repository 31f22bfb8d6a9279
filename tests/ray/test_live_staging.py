"""A model is downloaded on two nodes of a cluster; a failure on one does not reach the other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from offbeat.launch.hub_snapshot import HubSnapshot
from offbeat.launch.stage_nodes import live_nodes, stage_on_nodes
from tests.support.fake_hub import DATASET, FakeHub, serving

pytestmark = [pytest.mark.ray, pytest.mark.long]
FILES = {"config.json": b"{}", "model.safetensors": b"weights" * 1000}


@pytest.fixture
def snapshot(tmp_path: Path) -> Iterator[HubSnapshot]:
    """A model of a hub that two raylets on this machine reach."""
    hub = FakeHub(FILES, {})
    head: dict[str, Any] = {"num_cpus": 1, "include_dashboard": False, "dashboard_port": None}
    with serving(hub) as endpoint:
        both = Cluster(initialize_head=True, head_node_args=head)
        both.add_node(num_cpus=1)
        variables = {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": "0",
        }
        ray.init(address=both.address, log_to_driver=False, runtime_env={"env_vars": variables})
        yield HubSnapshot(DATASET, hub.first, {name: len(each) for name, each in FILES.items()})
        ray.shutdown()
        both.shutdown()


def test_each_node_gets_the_model_and_the_failure_of_one_is_named(
    snapshot: HubSnapshot, tmp_path: Path
) -> None:
    here, there = live_nodes()
    targets = {here: tmp_path / "0", there: tmp_path / "1"}
    lines = list[str]()
    assert stage_on_nodes(snapshot, targets, 60.0, lines.append) == {}
    assert sorted(line.split(": ")[-1] for line in lines)[-2:] == ["done", "done"]
    for target in targets.values():
        assert {name: (target / name).read_bytes() for name in FILES} == FILES

    (tmp_path / "1/model.safetensors").write_bytes(b"damaged")
    failures = stage_on_nodes(snapshot, targets, 60.0, lines.append)
    assert [name.endswith(there[0][:6]) for name in failures] == [True]
    assert "model.safetensors differed from the checksum" in str(*failures.values())
