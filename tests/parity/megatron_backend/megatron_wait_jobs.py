"""How long the groups of a megatron layout wait. Runs in workers only."""

from typing import Any

import torch
from megatron.core import parallel_state

from offbeat.plugins.megatron.groups import start_groups
from offbeat.plugins.megatron.section import MegatronTrainerConfig
from offbeat.trainers.ranks.peers import Peers


def waits(peers: Peers) -> set[float]:
    """Seconds that the groups of this rank wait for another."""
    start_groups(MegatronTrainerConfig(device="cpu", data_parallel=peers.size), peers)
    try:
        groups: list[Any] = [
            parallel_state.get_data_parallel_group(),
            parallel_state.get_tensor_model_parallel_group(),
        ]
        # torch says it in no public place.
        backends = [each._get_backend(torch.device("cpu")) for each in groups]  # noqa: SLF001 -- as above
        return {each.options._timeout.total_seconds() for each in backends}  # noqa: SLF001 -- as above
    finally:
        parallel_state.destroy_model_parallel()
