"""Builds the trainer and the weight source of a rank, for all backends."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.trainer import TrainerConfig
from offbeat.trainers.expert_names import Meta, Named
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.receiver_names import names_for_files, names_for_module
from offbeat.trainers.spec import TrainerSpec
from offbeat.trainers.weights import TrainedWeights
from offbeat.weight_sync.dtypes import WirePolicy
from offbeat.weight_sync.manifest import Adapter
from offbeat.weight_sync.source import GatheredSource

T_co = TypeVar("T_co", covariant=True)
Section = TypeVar("Section", bound=TrainerConfig)
Section_contra = TypeVar("Section_contra", bound=TrainerConfig, contravariant=True)


class MakesTrainer(Protocol[Section_contra, T_co]):
    """Constructor signature that the trainers of all backends share."""

    def __call__(
        self,
        model_path: str | Path,
        *,
        trainer: Section_contra,
        model: ModelConfig,
        total_steps: int,
        seed: int,
        peers: Peers,
    ) -> T_co: ...


def trainer_of(
    kind: MakesTrainer[Section, T_co], spec: TrainerSpec, trainer: Section, peers: Peers
) -> T_co:
    """Build the trainer of one rank."""
    config = spec.config
    return kind(
        config.model.path,
        trainer=trainer,
        model=config.model,
        total_steps=config.steps,
        seed=config.seed,
        peers=peers,
    )


def source_of(
    spec: TrainerSpec, metas: Iterable[Meta], named: Callable[[], Iterator[Named]]
) -> GatheredSource:
    """Build the weight source of one rank, with the names that the run's engines load.

    Args:
        spec: The rank's spec.
        metas: Name, shape and dtype of every weight, in the order of ``named``.
        named: Iterates over the whole weights, on all ranks together.

    Raises:
        UntrainableModel: The engines need names that no known naming yields.
    """
    config, sync, weight_metas = spec.config, spec.config.sync, list(metas)
    if config.generator.backend == "vllm":
        names = names_for_files(config.model.path, weight_metas)
    else:
        remote_code = config.model.trust_remote_code
        names = names_for_module(config.model.path, weight_metas, remote_code=remote_code)
    return GatheredSource(
        names.metas(weight_metas),
        lambda: names.named(named()),
        int(sync.chunk_mib * 2**20),
        WirePolicy(sync.wire_dtype, sync.keep_float32),
    )


def adapter_source_of(
    spec: TrainerSpec, adapters: TrainedWeights, adapter: Adapter
) -> GatheredSource:
    """Build the weight source of one rank that trains adapters, whose releases hold nothing else."""
    sync = spec.config.sync
    return GatheredSource(
        adapters.metas(),
        adapters.named,
        int(sync.chunk_mib * 2**20),
        WirePolicy(sync.wire_dtype, sync.keep_float32),
        adapter,
    )
