"""A small random model of a class, with windows and original lengths of only a few tokens.

Behaviour beyond an attention window or the original training length does not show in rows that are
short enough to compute with the model itself. A tiny model has reduced lengths, fewer and narrower
layers, and large weights. So attention is far from uniform and caps have an effect.
"""

# pyright: reportPrivateUsage=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped. Private names are explained
# where they are used.

import copy
import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import structlog
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from offbeat.models.loading import LOADING
from offbeat.models.plain import plain_logprobs

LENGTH: Final = 48  # tokens of the longest sequence that a tiny model computes
SHORT: Final = 16  # reduced value of lengths that a run's longest sequence exceeds
VOCABULARY: Final = 64
_LAYERS: Final = 4  # number kept of a model with equal layers
_KINDS: Final = 8  # maximum number of kinds of layers; one layer of each is kept
_HEAD: Final = 8  # dimensions left of a head
_MOST: Final = {"token_id": VOCABULARY - 1, "vocab": VOCABULARY, "experts": 16}
_LARGEST_PARAMETERS: Final = 110_000_000  # maximum of a tiny model
_SMALL_PARAMETERS: Final = 1_000_000  # below this, only lengths are reduced
_WIDE: Final = 32  # sizes from here on may be divided
_GAIN: Final = 2.0  # scale of a matrix, relative to one that keeps the variance of its input
_INITIALIZER_RANGE: Final = 0.2  # of weights outside the matrices of layers
_BOUND_NAMES: Final = ("position", "seq", "length", "context")
_LENGTH_NAMES: Final = (*_BOUND_NAMES, "window", "chunk", "block_size")
_COUNT_NAMES: Final = ("num_", "n_head", "n_layer", "heads", "layers", "experts", "group", "token")
_RANGE_NAMES: Final = ("initializer_range", "init_std")

_log = structlog.stdlib.get_logger()
_configs: Final[dict[tuple[object, ...], PreTrainedConfig]] = {}  # of earlier tiny models


@dataclass(frozen=True, slots=True)
class _Cut:
    """Settings that reduce a model's config to a tiny model's config."""

    max_model_len: int
    layers: int  # layers of the model
    kept_layers: tuple[int, ...] | None  # indices of kept layers; None: all
    divide: int  # divisor of sizes
    bounds: bool  # whether limits of positions below the longest sequence are also reduced

    def value(self, name: str, value: Any) -> Any:  # noqa: ANN401 -- any config value
        """Return the tiny model's value of a config key."""
        if isinstance(value, dict):
            return {str(key): self.value(str(key), each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            kept = self._sequence(value)
            is_length = any(each in name for each in _LENGTH_NAMES)
            return (
                type(value)(self.value(name, each) for each in kept)
                if is_length
                else type(value)(kept)
            )
        if isinstance(value, float) and name in _RANGE_NAMES:
            return _INITIALIZER_RANGE
        if isinstance(value, int) and not isinstance(value, bool):
            return self._number(name, value)
        return value

    def length(self, value: int, *, cut: bool = True) -> int:
        """Reduce a length. With ``cut``, lengths below ``max_model_len`` become <= ``SHORT``."""
        return min(value, SHORT) if cut and value < self.max_model_len else LENGTH

    def lengths(self, value: Any) -> Any:  # noqa: ANN401 -- as above
        """Return the reduced value of a length, or of a list of lengths for the kept layers."""
        if isinstance(value, int):
            return self.length(value) if value > SHORT else value
        return [self.lengths(each) for each in self._sequence(value)]

    def may_be_length(self, name: str, value: object) -> bool:
        """Return whether a number may be a length although its name does not say so."""
        if isinstance(value, list | tuple):  # one per layer
            each_of = cast("Sequence[object]", value)
            return len(each_of) == self.layers and any(self.may_be_length(name, v) for v in each_of)
        named = (*_LENGTH_NAMES, *_COUNT_NAMES, *_MOST)
        if isinstance(value, bool) or not isinstance(value, int) or value <= SHORT:
            return False
        return not any(each in name for each in named)

    def _sequence(self, values: Sequence[Any]) -> Sequence[Any]:
        if len(values) == self.layers:
            return [values[place] for place in self.kept_layers or range(self.layers)]
        factors = all(isinstance(each, int | float) for each in values)
        if factors and len(values) >= SHORT:  # one per pair of a head's dimensions
            return values[: max(1, len(values) // self.divide)]
        return values

    def _number(self, name: str, value: int) -> int:
        """Return the reduced value of an id, a length, a count or a size, classified by its name."""
        if self.kept_layers is not None and value == self.layers and "layer" in name:
            return len(self.kept_layers)
        for part, most in _MOST.items():
            if part in name and "tok" not in name.replace("token_id", ""):
                return min(value, most)
        if any(each in name for each in _LENGTH_NAMES):
            is_bound = any(each in name for each in _BOUND_NAMES) and "original" not in name
            return self.length(value, cut=self.bounds or not is_bound)
        is_count = any(each in name for each in _COUNT_NAMES)
        return value if is_count or value < _WIDE else max(1, value // self.divide)


@contextmanager
def compute_in_one_thread() -> Generator[None]:
    """Use one thread of torch in the block.

    The passes of a tiny model take microseconds. On a busy machine, threads that share such a pass
    spend milliseconds waiting for each other.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def tiny_model(
    kind: type[PreTrainedModel], config: PreTrainedConfig, max_model_len: int
) -> PreTrainedModel | None:
    """Return a tiny model on the CPU, in float32, with eager attention, or None if no config works.

    A row of ``LENGTH`` tokens exceeds those reduced lengths that ``max_model_len`` exceeds in the
    config, and no others.
    """
    key = kind, repr(config.to_dict()), max_model_len
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        if key in _configs:
            return _random_model(kind, _configs[key])
        try:
            cuts = list(_cuts(kind, config, max_model_len))
        except Exception as error:  # noqa: BLE001 -- a class may refuse to return its shapes
            _log.debug("tiny_model.refused", error=str(error)[:200])
            return None
        refused = ""
        for cut in cuts:
            try:
                smaller = _smaller(kind, config, cut)
                if sum(each.numel() for each in _shapes(kind, smaller)) > _LARGEST_PARAMETERS:
                    continue
                model = _random_model(kind, smaller)
                known = len(cast("torch.Tensor", model.get_input_embeddings().weight))
                tokens = torch.randint(known, (LENGTH,)).tolist()
                if plain_logprobs(model, tokens).isfinite().all():
                    _configs[key] = smaller
                    return model
            except Exception as error:  # noqa: BLE001 -- sizes may be invalid for the class
                refused = str(error)[:200]
    _log.debug("tiny_model.refused", error=refused)
    return None


def _random_model(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = _made(kind, config, "eager")
    _widen(model)
    return model


def with_attention(model: PreTrainedModel, implementation: str) -> PreTrainedModel:
    """Return a copy of a tiny model with a different attention implementation."""
    with torch.random.fork_rng(devices=[]):
        other = _made(type(model), model.config, implementation)
    other.load_state_dict(model.state_dict())
    return other


def _cuts(
    kind: type[PreTrainedModel], config: PreTrainedConfig, max_model_len: int
) -> Iterator[_Cut]:
    """Yield reductions to try, the smallest tiny model first."""
    layers: int = config.get_text_config(decoder=True).num_hidden_layers
    small = sum(each.numel() for each in _shapes(kind, config)) <= _SMALL_PARAMETERS
    fewer = layers > _LAYERS and not small
    for kept in dict.fromkeys((_kept_layers(config, layers) if fewer else None, None)):
        for divide in (1,) if small else _divisors(config):
            for bounds in (True, False):
                yield _Cut(max_model_len, layers, kept, divide, bounds)


def _divisors(config: PreTrainedConfig) -> Iterator[int]:
    """Yield powers of two, starting with the largest that leaves heads with some dimensions."""
    text = config.get_text_config(decoder=True)
    values = text.to_dict()  # some configs refuse an attribute that differs between layers
    heads, width = getattr(text, "num_attention_heads", 0), getattr(text, "hidden_size", 0)
    head = values.get("head_dim") or (width // heads if heads else 0)
    largest = int(math.log2(max(1, head // _HEAD))) if head else 3
    yield from (2**power for power in range(largest, -1, -1))


def _shapes(kind: type[PreTrainedModel], config: PreTrainedConfig) -> list[torch.Size]:
    with LOADING, torch.device("meta"):
        return [each.shape for each in kind._from_config(config).parameters()]  # noqa: SLF001


def _made(
    kind: type[PreTrainedModel], config: PreTrainedConfig, implementation: str
) -> PreTrainedModel:
    own = copy.deepcopy(config)
    with LOADING:
        model = kind._from_config(own, attn_implementation=implementation, dtype=torch.float32)  # noqa: SLF001
    return model.eval()


@torch.no_grad()
def _widen(model: PreTrainedModel) -> None:
    """Scale matrices so that attention is far from uniform."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0, _GAIN / math.sqrt(module.weight.shape[1]))
        elif isinstance(module, Conv1D):
            module.weight.normal_(0, _GAIN / math.sqrt(module.weight.shape[0]))


def _smaller(kind: type[PreTrainedModel], config: PreTrainedConfig, cut: _Cut) -> PreTrainedConfig:
    """Return the config of a tiny model.

    A number that affects no weight's shape may be a length, and is reduced like one.
    """
    given = config.to_dict()
    values = {name: cut.value(name, each) for name, each in given.items()}
    smaller = type(config).from_dict(values)
    shapes = _shapes(kind, smaller)
    for name in (name for name, each in given.items() if cut.may_be_length(name, each)):
        values_then = {**values, name: cut.lengths(given[name])}
        if cut.bounds and _has_shapes(kind, type(config), values_then, shapes):
            values = values_then
    return type(config).from_dict(values)


def _has_shapes(
    kind: type[PreTrainedModel],
    config: type[PreTrainedConfig],
    values: dict[str, Any],
    shapes: list[torch.Size],
) -> bool:
    try:
        return _shapes(kind, config.from_dict(dict(values))) == shapes
    except Exception:  # noqa: BLE001 -- as above
        return False


def _kept_layers(config: PreTrainedConfig, layers: int) -> tuple[int, ...]:
    """Return the indices of layers to keep: the first of each kind, then the first of the rest."""
    lists = [each for each in _sequences(config.to_dict()) if len(each) == layers]
    kinds = [repr([each[place] for each in lists]) for place in range(layers)]
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    others = [place for place in range(layers) if place not in firsts]
    return tuple(sorted((firsts + others)[: max(_LAYERS, min(_KINDS, len(firsts)))]))


def _sequences(values: object) -> Iterator[Sequence[Any]]:
    if isinstance(values, list | tuple):
        yield values
    elif isinstance(values, dict):
        for each in values.values():
            yield from _sequences(each)
