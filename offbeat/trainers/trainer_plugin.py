"""Interfaces of plug-ins for a trainer: a backend, or a part with a section of ``trainer``.

The models of a recipe import this module, so it imports none of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, cast

from offbeat.config.base import Config
from offbeat.config.problems import Clash
from offbeat.config.trainer_backends import CORE_BACKENDS
from offbeat.doors import find_plugin, find_plugins
from offbeat.messages.finding import Finding

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from offbeat.config.run import RunConfig
    from offbeat.config.sections.trainer_base import ModelTrainerConfig
    from offbeat.trainers.expert_names import Named
    from offbeat.trainers.model_trainer import ModelTrainer
    from offbeat.trainers.ranks.peers import Peers
    from offbeat.trainers.spec import TrainerSpec
    from offbeat.trainers.torch.torch_trainer import TorchParts
    from offbeat.weight_sync.grid import ModelGrid
    from offbeat.weight_sync.transport import WeightSource


class TrainerPlugin(ABC):
    """Trains a model with a library other than torch."""

    section: "type[ModelTrainerConfig]"
    """Model of section ``trainer`` with this backend."""

    packages: ClassVar[Mapping[str, str]] = {}
    """Packages that only this backend needs, each with the extra of offbeat that installs it."""

    why_not_local: str = "its ranks are actors of Ray"
    """Why this backend cannot run in the process of ``runtime.backend=local``."""

    loads_parts: ClassVar[bool] = False
    """Whether each rank loads only its part of the model, so that no rank holds the whole model."""

    gathers_everywhere: ClassVar[bool] = False
    """Whether every rank (encoder ranks too) gathers the whole model before rank 0 sends it."""

    cuts_heads: ClassVar[bool] = False
    """Whether more tensor ranks than key-value heads are allowed, each holding a part of a head."""

    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield incompatible settings. A dry run ignores them."""
        del config
        yield from ()

    def check(self, config: "RunConfig", gpu: int | None) -> Iterator[Finding]:
        """Yield findings about the recipe's model on this backend.

        Args:
            config: The recipe.
            gpu: Memory of a rank's GPU in bytes. None: unknown, or the ranks are on the CPU.
        """
        del config, gpu
        yield from ()

    def check_frozen(self, model: "PreTrainedModel", patterns: Sequence[str]) -> None:
        """Check that this backend can exclude from training the parameters that the patterns match.

        Raises:
            UntrainableModel: It cannot do that.
        """
        del model, patterns

    def picture_families(self) -> Sequence[str]:
        """Return the model families (``model_type``) that this backend trains with pictures."""
        return ()

    @abstractmethod
    def model_grid(self, config: "RunConfig") -> "ModelGrid":
        """Return the parallel sizes of the language model's ranks.

        Raises:
            LayoutRefused: The sizes are incompatible.
        """

    def held_by_rank(self, config: "RunConfig") -> "RankBytes | None":
        """Return the bytes of the rank that holds most of the recipe's model, or None if unknown.

        Raises:
            UntrainableModel: This backend cannot train the model.
        """
        del config
        return None

    def prepare_process(self, config: "RunConfig", stack: ExitStack) -> None:
        """Import the backend's library in the process of a rank.

        Args:
            config: The recipe.
            stack: Stack of contexts that is closed at the end of the process.
        """
        del config, stack

    @abstractmethod
    def make_trainer(self, spec: "TrainerSpec", peers: "Peers") -> "ModelTrainer":
        """Create the trainer of a rank in a prepared process."""

    @abstractmethod
    def make_rank(self, spec: "TrainerSpec", peers: "Peers") -> "tuple[ModelTrainer, WeightSource]":
        """Create the trainer of a rank and the source of its weights."""

    def wrote_state(self, path: Path) -> bool:
        """Return whether a directory holds a state of this backend."""
        del path
        return False

    def read_weights(self, path: Path) -> "Iterator[Named]":
        """Yield the weights of such a state, under the names of the model's files."""
        del path
        yield from ()


def find_trainer(backend: str) -> TrainerPlugin | None:
    """Return the plug-in of a backend, or None if the core has the backend.

    Raises:
        PluginUnusable: No package provides the backend, or its import fails.
    """
    if backend in CORE_BACKENDS:
        return None
    return cast("TrainerPlugin", find_plugin("trainer", backend))


def known_trainers() -> dict[str, TrainerPlugin]:
    """Return the backends that plug-ins of this package provide, by name."""
    return cast("dict[str, TrainerPlugin]", find_plugins("trainer"))


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Bytes that a rank holds throughout a step, without activations."""

    weights: int
    gradients: int
    optimizer: int  # masters and moments

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


T = TypeVar("T")


class AddedModules(NamedTuple):
    """Names of the modules that replace a linear module: its matrix, and an addition to it."""

    matrix: str
    """Linear module with the matrix of the model."""

    first: str
    """Linear module of the addition that reads the inputs of the matrix."""

    last: str
    """Linear module of the addition whose outputs are added to the outputs of the matrix."""


class TrainerPart(ABC):
    """Replaces a part of a trainer if the recipe uses this plug-in.

    By default it is active if the recipe has its section. Methods that get a recipe are called only
    if it is active.
    """

    key: str
    """Name of this part's section below ``trainer``."""

    section: type[Config] | None = None
    """Model of its section, or None if keys of the core decide whether the part is used."""

    doc: str = ""
    """Documentation of its section."""

    backend: ClassVar[str | None] = None
    """Name of the only backend that has the section, or None if every backend of a model has it."""

    is_fixed: ClassVar[bool] = False
    """Whether the section cannot change when a run resumes."""

    has_common_name: ClassVar[bool] = False
    """Whether other libraries also have a section of this name. Then an unknown key may mean it."""

    packages: ClassVar[Mapping[str, str]] = {}
    """Packages that only this part needs, each with the extra of offbeat that installs it."""

    freezes_model: ClassVar[bool] = False
    """Whether this part freezes the model and trains weights next to it (its additions)."""

    additions: ClassVar[str] = ""
    """Word that findings use for its additions."""

    size_key: ClassVar[str] = ""
    """Recipe key for the size of its additions."""

    def is_used(self, trainer: Config) -> bool:
        """Return whether a section ``trainer`` uses this part."""
        return getattr(trainer, self.key, None) is not None

    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield settings that are incompatible, even in a dry run."""
        del config
        yield from ()

    def find_clashes_of_real_runs(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield settings that are incompatible unless stubs replace the devices."""
        del config
        yield from ()

    def check(self, config: "RunConfig", gpu: int | None) -> Iterator[Finding]:
        """Yield findings about the recipe's model.

        Args:
            config: The recipe.
            gpu: Memory of a rank's GPU in bytes. None: unknown, or the ranks are on the CPU.
        """
        del config, gpu
        yield from ()

    def check_model(self, config: "RunConfig", model: "PreTrainedModel") -> Iterator[Finding]:
        """Yield findings about a model without memory. The model is not changed."""
        del config, model
        yield from ()

    def add_to_model(self, config: "RunConfig", model: "PreTrainedModel") -> None:
        """Add its additions to a model without memory.

        Raises:
            PartPackageMissing: A package of this part cannot be imported.
            UntrainableModel: The model does not support additions.
        """
        del config, model

    def count_additions(self, config: "RunConfig", model: "PreTrainedModel") -> int:
        """Return the number of parameters of its additions to a model without memory.

        Raises:
            UntrainableModel: The model does not support additions.
        """
        del config, model
        return 0

    def replace_parts(self, config: "RunConfig", rank: int, parts: "TorchParts") -> "TorchParts":
        """Return the parts of a rank's torch trainer. This part of the recipe replaces some."""
        del config, rank
        return parts

    def choose_trainer(self, config: "RunConfig", rank: int) -> Callable[..., Any] | None:
        """Return the factory of a rank's trainer, or None for the backend's own class."""
        del config, rank
        return None

    def make_source(self, spec: "TrainerSpec", trainer: Any) -> "WeightSource | None":  # noqa: ANN401 -- of its class
        """Return the source of a rank's weights, or None for the backend's source.

        Args:
            spec: Spec of the rank.
            trainer: The rank's trainer, of the class that this part chose.
        """
        del spec, trainer
        return None

    def find_added(self, model: "nn.Module", module: str) -> AddedModules | None:
        """Return the modules that replace a linear module, or None if it stays unchanged."""
        del model, module
        return None

    def name_in_files(self, parameter: str) -> str | None:
        """Return the name in files for a parameter of the additions, None for other parameters."""
        del parameter
        return None

    def names_addition(self, name: str) -> bool:
        """Return whether a tensor of this name in files belongs to its additions."""
        del name
        return False


def find_parts(config: "RunConfig") -> list[TrainerPart]:
    """Return the parts that a recipe replaces."""
    return [part for part in known_parts() if part.is_used(config.trainer)]


def known_parts() -> list[TrainerPart]:
    """Return the parts that plug-ins of this package provide."""
    return [*cast("dict[str, TrainerPart]", find_plugins("trainer_part")).values()]


def freezing_part(config: "RunConfig") -> TrainerPart | None:
    """Return the part that freezes the model and trains weights next to it, or None."""
    return next((part for part in find_parts(config) if part.freezes_model), None)


def choose_trainer(config: "RunConfig", rank: int, default: Callable[..., T]) -> Callable[..., T]:
    """Return the factory of a rank's trainer. A part may replace it."""
    chosen: Callable[..., Any] = default
    for part in find_parts(config):
        chosen = part.choose_trainer(config, rank) or chosen
    return chosen


def replace_parts(config: "RunConfig", rank: int, parts: "TorchParts") -> "TorchParts":
    """Return the parts of a rank's torch trainer. Plug-ins replace some of them."""
    for part in find_parts(config):
        parts = part.replace_parts(config, rank, parts)
    return parts


def make_source(spec: "TrainerSpec", trainer: object) -> "WeightSource | None":
    """Return the source of a rank's weights that a part makes, or None for the backend's source."""
    made = (part.make_source(spec, trainer) for part in find_parts(spec.config))
    return next((source for source in made if source is not None), None)
