"""A model is put on two nodes of a cluster, and a damaged file there again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from offbeat.actors.staging_actor import ModelReaderActor, RemoteSource
from offbeat.launch.stage import node_ids, stage_on
from offbeat.staging.manifest import ManifestFile
from offbeat.staging.outcome import StagingVerdict
from offbeat.staging.progress import ProgressMeter
from offbeat.staging.source import CHUNK_BYTES, read_manifest

pytestmark = [pytest.mark.ray, pytest.mark.long]
STALL_S = 60.0
COPIED, KEPT = StagingVerdict.COPIED, StagingVerdict.KEPT


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """Two raylets on this machine."""
    head: dict[str, Any] = {"num_cpus": 1, "include_dashboard": False, "dashboard_port": None}
    both = Cluster(initialize_head=True, head_node_args=head)
    both.add_node(num_cpus=1)
    ray.init(address=both.address, log_to_driver=False)
    yield node_ids()
    ray.shutdown()
    both.shutdown()


def test_each_node_gets_the_model_once_and_a_damaged_file_again(
    nodes: list[str], tmp_path: Path
) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "model.safetensors").write_bytes(bytes(range(256)) * (CHUNK_BYTES // 128))
    manifest = read_manifest(source, ProgressMeter())
    targets = {node: tmp_path / f"local-{index}" for index, node in enumerate(nodes)}

    first = stage_on(targets, source, manifest, STALL_S, print)
    assert len(first) == 2
    assert [each.verdict for each in first.values()] == [COPIED, COPIED]

    damaged, whole = targets.values()
    with (damaged / "model.safetensors").open("r+b") as file:
        file.write(b"x")
    again = stage_on(targets, source, manifest, STALL_S, print)
    assert [(each.verdict, each.copied_files) for each in again.values()] == [
        (COPIED, 1),
        (KEPT, 0),
    ]
    assert [read_manifest(each, ProgressMeter()) for each in (damaged, whole)] == [manifest] * 2

    reader = ray.remote(ModelReaderActor).options(num_cpus=0).remote(source, manifest)
    for file in manifest.files:
        content = b"".join(RemoteSource(reader).chunks(file))
        assert content == (source / file.name).read_bytes()
    unknown = ManifestFile("other.txt", 1, "")
    with pytest.raises(OSError, match="cannot be read from the driver's node"):
        list(RemoteSource(reader).chunks(unknown))
