"""Interface of a backend of the trainer that a plug-in brings.

The models of a recipe import this module, so it imports none of them.

Bytes that a trainer rank holds throughout a step, by kind.

Interface of a part of a trainer that a plug-in exchanges, in a section of ``trainer``.

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
from offbeat.doors import find_plugin, plugins_of
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


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Bytes that a rank holds throughout a step; activations come on top."""

    weights: int
    gradients: int
    optimizer: int  # masters and moments

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


T = TypeVar("T")


class AddedModules(NamedTuple):
    """Names of the modules that replace a linear module, and compute it and an addition to it."""

    matrix: str
    """Linear module with the matrix of the model."""

    first: str
    """Linear module of the addition that reads the inputs of the matrix."""

    last: str
    """Linear module of the addition whose outputs are added to the outputs of the matrix."""


class TrainerPart(ABC):
    """Exchanges a part of a trainer where the recipe uses it: by default, where it has its section.

    Methods with a recipe are called only then.
    """

    key: str
    """Name of its section below ``trainer``."""

    section: type[Config] | None = None
    """Model of its section; None: keys of the core say whether it is used."""

    doc: str = ""
    """Documentation of its section."""

    backend: ClassVar[str | None] = None
    """Name of the only backend that has the section; None: every backend of a model has it."""

    is_fixed: ClassVar[bool] = False
    """Whether the section cannot change when a run resumes."""

    has_common_name: ClassVar[bool] = False
    """Whether other libraries have a section of this name, too: an unknown key may mean it."""

    packages: ClassVar[Mapping[str, str]] = {}
    """Packages that only this part needs, with the extra of offbeat that installs each."""

    freezes_model: ClassVar[bool] = False
    """Whether it freezes the model and trains weights next to it: its additions."""

    additions: ClassVar[str] = ""
    """Word of findings for what it trains next to the model."""

    size_key: ClassVar[str] = ""
    """Key of the recipe that says how large its additions are."""

    def is_used(self, trainer: Config) -> bool:
        """Return whether a section ``trainer`` uses this part."""
        return getattr(trainer, self.key, None) is not None

    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield settings that do not go together, in a dry run neither."""
        del config
        yield from ()

    def find_clashes_of_real_runs(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield settings that do not go together unless stubs stand for the devices."""
        del config
        yield from ()

    def check(self, config: "RunConfig", gpu: int | None) -> Iterator[Finding]:
        """Yield findings about the recipe's model.

        Args:
            config: The recipe.
            gpu: Memory of a rank's GPU in bytes; None: unknown, or the ranks are on the CPU.
        """
        del config, gpu
        yield from ()

    def check_model(self, config: "RunConfig", model: "PreTrainedModel") -> Iterator[Finding]:
        """Yield findings about a model without memory, which stays as it is."""
        del config, model
        yield from ()

    def add_to_model(self, config: "RunConfig", model: "PreTrainedModel") -> None:
        """Add its additions to a model without memory.

        Raises:
            PartPackageMissing: A package of this part cannot be imported.
            UntrainableModel: The model takes none.
        """
        del config, model

    def count_additions(self, config: "RunConfig", model: "PreTrainedModel") -> int:
        """Return the number of parameters of its additions to a model without memory.

        Raises:
            UntrainableModel: The model takes none.
        """
        del config, model
        return 0

    def replace_parts(self, config: "RunConfig", rank: int, parts: "TorchParts") -> "TorchParts":
        """Return the parts of the torch trainer of a rank, with its own in the place of some."""
        del config, rank
        return parts

    def choose_trainer(self, config: "RunConfig", rank: int) -> Callable[..., Any] | None:
        """Return what makes a rank's trainer, if its backend is a plug-in; None: the backend's class."""
        del config, rank
        return None

    def make_source(self, spec: "TrainerSpec", trainer: Any) -> "WeightSource | None":  # noqa: ANN401 -- of its class
        """Return the source of a rank's weights; None: the source of the backend.

        Args:
            spec: What the rank is built from.
            trainer: The rank's trainer, of the class that it chose.
        """
        del spec, trainer
        return None

    def find_added(self, model: "nn.Module", module: str) -> AddedModules | None:
        """Return the modules that replace a linear module of a model; None: it replaced none of this name."""
        del model, module
        return None

    def name_in_files(self, parameter: str) -> str | None:
        """Return the name in files of a parameter of its additions; None: the parameter is not one."""
        del parameter
        return None

    def names_addition(self, name: str) -> bool:
        """Return whether a tensor of this name in files is one of its additions."""
        del name
        return False


def parts_of(config: "RunConfig") -> list[TrainerPart]:
    """Return the parts that a recipe exchanges."""
    return [part for part in known_parts() if part.is_used(config.trainer)]


def known_parts() -> list[TrainerPart]:
    """Return the parts that plug-ins of this package bring."""
    return [*cast("dict[str, TrainerPart]", plugins_of("trainer_part")).values()]


def freezing_part(config: "RunConfig") -> TrainerPart | None:
    """Return the part that trains weights next to the model, which it freezes, if there is one."""
    return next((part for part in parts_of(config) if part.freezes_model), None)


def choose_trainer(config: "RunConfig", rank: int, default: Callable[..., T]) -> Callable[..., T]:
    """Return what makes a rank's trainer, which a part may exchange."""
    chosen: Callable[..., Any] = default
    for part in parts_of(config):
        chosen = part.choose_trainer(config, rank) or chosen
    return chosen


def replace_parts(config: "RunConfig", rank: int, parts: "TorchParts") -> "TorchParts":
    """Return the parts of the torch trainer of a rank, some of which plug-ins replace."""
    for part in parts_of(config):
        parts = part.replace_parts(config, rank, parts)
    return parts


def make_source(spec: "TrainerSpec", trainer: object) -> "WeightSource | None":
    """Return the source of a rank's weights that a part makes; None: the source of the backend."""
    made = (part.make_source(spec, trainer) for part in parts_of(spec.config))
    return next((source for source in made if source is not None), None)
