"""Interface of a backend of the trainer that a plug-in brings.

The models of a recipe import this module, so it imports none of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from offbeat.config.clash import Clash
from offbeat.config.trainer_backends import CORE_BACKENDS
from offbeat.doors import find_plugin, plugins_of
from offbeat.messages.finding import Finding

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from offbeat.config.run import RunConfig
    from offbeat.config.sections.trainer_base import ModelTrainerConfig
    from offbeat.trainers.expert_names import Named
    from offbeat.trainers.model_trainer import ModelTrainer
    from offbeat.trainers.rank_bytes import RankBytes
    from offbeat.trainers.ranks.peers import Peers
    from offbeat.trainers.spec import TrainerSpec
    from offbeat.weight_sync.grid import ModelGrid
    from offbeat.weight_sync.transport import WeightSource


class TrainerPlugin(ABC):
    """Trains a model by another library than torch."""

    section: "type[ModelTrainerConfig]"
    """Model of section ``trainer`` with this backend."""

    packages: ClassVar[Mapping[str, str]] = {}
    """Packages that only this backend needs, with the extra of offbeat that installs each."""

    why_not_local: str = "its ranks are actors of Ray"
    """Why it cannot run in the process of ``runtime.backend=local``."""

    loads_parts: ClassVar[bool] = False
    """Whether each rank loads its part of the model, so that none has to hold the whole model."""

    gathers_everywhere: ClassVar[bool] = False
    """Whether every rank gathers the whole model before rank 0 sends it, encoder ranks too."""

    cuts_heads: ClassVar[bool] = False
    """Whether tensor ranks beyond the number of key-value heads hold a part of a head each."""

    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield settings that do not go together; a dry run does without them."""
        del config
        yield from ()

    def check(self, config: "RunConfig", gpu: int | None) -> Iterator[Finding]:
        """Yield findings about the recipe's model on this backend.

        Args:
            config: The recipe.
            gpu: Memory of a rank's GPU in bytes; None: unknown, or the ranks are on the CPU.
        """
        del config, gpu
        yield from ()

    def check_frozen(self, model: "PreTrainedModel", patterns: Sequence[str]) -> None:
        """Check that it can exclude the parameters that patterns match from training.

        Raises:
            UntrainableModel: It cannot.
        """
        del model, patterns

    def picture_families(self) -> Sequence[str]:
        """Return the families of models, as ``model_type`` names them, that it trains with pictures."""
        return ()

    @abstractmethod
    def model_grid(self, config: "RunConfig") -> "ModelGrid":
        """Return the parallel sizes of the language model's ranks.

        Raises:
            LayoutRefused: They do not go together.
        """

    def held_by_rank(self, config: "RunConfig") -> "RankBytes | None":
        """Return the bytes of the rank that holds most of the recipe's model; None: not known.

        Raises:
            UntrainableModel: It cannot train the model.
        """
        del config
        return None

    def prepare_process(self, config: "RunConfig", stack: ExitStack) -> None:
        """Import the library of a rank, which has the process for itself.

        Args:
            config: The recipe.
            stack: Is closed at the end of the process.
        """
        del config, stack

    @abstractmethod
    def make_trainer(self, spec: "TrainerSpec", peers: "Peers") -> "ModelTrainer":
        """Create the trainer of a rank, in a process that is prepared for it."""

    @abstractmethod
    def make_rank(self, spec: "TrainerSpec", peers: "Peers") -> "tuple[ModelTrainer, WeightSource]":
        """Create the trainer of a rank, and the source of its weights."""

    def wrote_state(self, path: Path) -> bool:
        """Return whether a directory holds a state of this backend."""
        del path
        return False

    def read_weights(self, path: Path) -> "Iterator[Named]":
        """Yield the weights of such a state, with the names of the model's files."""
        del path
        yield from ()


def find_trainer(backend: str) -> TrainerPlugin | None:
    """Return the plug-in of a backend, or None if the core has the backend.

    Raises:
        PluginUnusable: No package brings it, or its import fails.
    """
    if backend in CORE_BACKENDS:
        return None
    return cast("TrainerPlugin", find_plugin("trainer", backend))


def known_trainers() -> dict[str, TrainerPlugin]:
    """Return the backends that plug-ins of this package bring, by name."""
    return cast("dict[str, TrainerPlugin]", plugins_of("trainer"))
