"""megatron-core as a backend of the trainer: ``trainer.backend=megatron``."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from offbeat.config.base import of_kind
from offbeat.config.problems import Clash
from offbeat.messages.finding import Finding
from offbeat.plugins.megatron.section import MegatronTrainerConfig, layout_clashes
from offbeat.trainers.trainer_plugin import TrainerPlugin

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from offbeat.config.run import RunConfig
    from offbeat.trainers.expert_names import Named
    from offbeat.trainers.model_trainer import ModelTrainer
    from offbeat.trainers.ranks.peers import Peers
    from offbeat.trainers.spec import TrainerSpec
    from offbeat.trainers.trainer_plugin import RankBytes
    from offbeat.weight_sync.grid import ModelGrid
    from offbeat.weight_sync.transport import WeightSource


class MegatronPlugin(TrainerPlugin):
    """Trains mapped model families over five axes of parallelism."""

    section = MegatronTrainerConfig
    packages: ClassVar = {"megatron-core": "megatron"}
    why_not_local = "its global state belongs to one process per rank"
    loads_parts = True
    gathers_everywhere = True
    cuts_heads = True

    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield parallel sizes that cannot work together."""
        yield from layout_clashes(of_kind(MegatronTrainerConfig, config.trainer))

    def check(self, config: "RunConfig", gpu: int | None) -> Iterator[Finding]:
        """Check that the trainer can divide the model, and check the size of its largest rank."""
        from offbeat.plugins.megatron.checks import check_layout

        yield from check_layout(config, gpu)

    def check_frozen(self, model: "PreTrainedModel", patterns: Sequence[str]) -> None:
        """Refuse patterns that match a name outside of a vision tower.

        Raises:
            UntrainableModel: A pattern does.
        """
        from offbeat.plugins.megatron.freezing import frozen_in_tower

        frozen_in_tower(model, patterns)

    def picture_families(self) -> Sequence[str]:
        """Return the families of image-text models that are mapped."""
        from offbeat.plugins.megatron.architecture import IMAGE_TEXT_FAMILIES

        return IMAGE_TEXT_FAMILIES

    def model_grid(self, config: "RunConfig") -> "ModelGrid":
        """Return the parallel sizes of the language model's ranks.

        Raises:
            LayoutRefused: They contradict each other.
        """
        from offbeat.plugins.megatron.layout import make_grid

        return make_grid(of_kind(MegatronTrainerConfig, config.trainer))

    def held_by_rank(self, config: "RunConfig") -> "RankBytes":
        """Return the bytes of the largest rank of the recipe's model.

        Raises:
            UntrainableModel: The model's family is not mapped.
        """
        from offbeat.plugins.megatron.architecture import read_architecture
        from offbeat.plugins.megatron.checks import held_by_megatron_rank

        trainer = of_kind(MegatronTrainerConfig, config.trainer)
        return held_by_megatron_rank(config, trainer, read_architecture(config.model.path))

    def prepare_process(self, config: "RunConfig", stack: ExitStack) -> None:
        """Import the library, which must find the stand-ins for CUDA if the device is a CPU."""
        import torch

        trainer = of_kind(MegatronTrainerConfig, config.trainer)
        torch.set_num_threads(trainer.threads)
        if trainer.device == "cpu":
            from offbeat.plugins.megatron.cpu_shim import cpu_stands_in

            stack.enter_context(cpu_stands_in(trainer.device))
        from offbeat.plugins.megatron import megatron_trainer

        del megatron_trainer  # the makers below import it again, at no cost

    def make_trainer(self, spec: "TrainerSpec", peers: "Peers") -> "ModelTrainer":
        """Create the trainer of a rank."""
        from offbeat.plugins.megatron.megatron_trainer import make_megatron_trainer

        return make_megatron_trainer(spec, peers)

    def make_rank(self, spec: "TrainerSpec", peers: "Peers") -> "tuple[ModelTrainer, WeightSource]":
        """Create the trainer of a rank, and the source of its weights."""
        from offbeat.plugins.megatron.megatron_trainer import make_megatron_rank

        return make_megatron_rank(spec, peers)

    def wrote_state(self, path: Path) -> bool:
        """Return whether a directory has the shares of its ranks."""
        return any(path.glob("share-*.safetensors"))

    def read_weights(self, path: Path) -> "Iterator[Named]":
        """Yield the weights of a state, with the names of the model's files."""
        from offbeat.plugins.megatron.state import SavedShares

        with SavedShares(path) as saved:
            yield from saved.weights()


TRAINER: Final = MegatronPlugin()
