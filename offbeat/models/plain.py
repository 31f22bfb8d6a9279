"""Reference forward pass of a model, and the bounds of its rounding errors."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# transformers leaves its configs and its loading functions untyped. Private names are explained
# where they are used.

import inspect
import math
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.messages.media import Media
from offbeat.models.media_rules import media_rules

HALF: Final = (torch.bfloat16, torch.float16)
TOLERANCES: Final = {
    torch.float64: 1e-3,  # transformers computes norms, softmax and rotary angles in float32
    torch.float32: 1e-3,
    torch.bfloat16: 0.5,
    torch.float16: 0.5,
}
"""Maximum mean ``Distance`` for a model in this dtype. See docs/model-proofs.md."""
WIDENED_TOLERANCE: Final = 1e-2
"""Largest mean ``Distance`` of a 16-bit model ``in_float32``: fewer operations round to 16 bits."""
TINY_TOLERANCE: Final = 3e-4
"""Maximum ``Distance`` of a token for a tiny model."""
_ROUNDING: Final = 4 * torch.finfo(torch.float32).eps  # of a log-probability, not counted


@torch.no_grad()
def plain_logprobs(
    model: PreTrainedModel, tokens: Sequence[int], first: int = 0, media: Media | None = None
) -> Tensor:
    """Return log-probabilities [T - 1] of the tokens after the first, by one plain forward pass.

    Args:
        model: Model with its attention configured.
        tokens: T tokens, in one row.
        first: Position of the first token. With 0, the model computes positions itself.
        media: Media to which all placeholder ids among the tokens belong.

    Returns:
        [T - 1] float32.
    """
    row = torch.tensor([tokens], device=model.device)
    places = torch.arange(first, first + len(tokens), device=model.device)[None]
    further = {"position_ids": places} if first else {}
    if media is not None:
        further |= media_rules(model.config).plain_inputs(model, media, row)
    logits = model(input_ids=row, use_cache=False, **further).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]


@torch.no_grad()
def check_last_position(model: PreTrainedModel, max_model_len: int) -> None:
    """Compute one token at the last position, if the model's forward has positions.

    Raises:
        IndexError: The model's table of positions is too short.
    """
    if "position_ids" in inspect.signature(model.forward).parameters:
        token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        model(input_ids=token, position_ids=token + max_model_len - 1, use_cache=False)


class Distance(NamedTuple):
    """Difference of log-probabilities, in standard deviations of the reference.

    A config can make a model's logits nearly equal, and then the effect of any mistake is small
    too. So no fixed bound in nats would work.
    """

    mean: float  # over the tokens of the worst sample; 16-bit routers may choose other experts
    worst: float  # of any token

    def problem(self, tolerance: float) -> str:
        """Return by how much the mean exceeds a tolerance, or empty if it does not."""
        if self.mean <= tolerance:
            return ""
        if math.isinf(self.mean):
            return "not finite"
        return f"off by {self.mean:.2g} of their spread, more than {tolerance:g}"


def distance(got: Iterable[Tensor], want: Iterable[Tensor]) -> Distance:
    """Return the distance of the samples' log-probabilities from a reference, infinite for NaN.

    Args:
        got: Log-probabilities of each sample.
        want: Reference of each sample. It may begin with further tokens.
    """
    wanted = [each.float().cpu() for each in want]
    spread = torch.cat(wanted).std(correction=0).clamp(min=torch.finfo(torch.float32).tiny)
    gaps = list[Tensor]()
    for sample, plain in zip(got, wanted, strict=True):
        reference = plain[len(plain) - len(sample) :]
        gap = (sample.float().cpu() - reference).abs() - _ROUNDING * reference.abs()
        gaps.append(gap.clamp(min=0) / spread)
    mean = float(torch.stack([each.mean() for each in gaps]).max())
    worst = float(torch.cat(gaps).max())
    if math.isnan(mean):
        return Distance(math.inf, math.inf)
    return Distance(mean, worst)


@contextmanager
def in_float32(model: PreTrainedModel) -> Generator[None]:
    """Compute in float32, inside the block, with the values of the model's 16-bit weights.

    Weights of a decoder layer are widened only while it computes. So memory holds both dtypes only
    for one layer and the weights outside of layers.
    """
    kinds = set(model._no_split_modules or ())  # noqa: SLF001 -- the only place with the names
    layers = [each for each in model.modules() if type(each).__name__ in kinds]
    in_layers = {id(each) for layer in layers for each in _tensors(layer)}
    with ExitStack() as undo:
        _widen((each for each in _tensors(model) if id(each) not in in_layers), undo)
        for layer in layers:
            own = undo.enter_context(ExitStack())

            def widen(layer: nn.Module, _: object, own: ExitStack = own) -> None:
                _widen(_tensors(layer), own)

            def restore(_: object, __: object, ___: object, own: ExitStack = own) -> None:
                own.close()

            undo.callback(layer.register_forward_pre_hook(widen).remove)
            undo.callback(layer.register_forward_hook(restore, always_call=True).remove)
        yield


def _tensors(module: nn.Module) -> Iterable[Tensor]:
    return (*module.parameters(), *module.buffers())


def _widen(tensors: Iterable[Tensor], undo: ExitStack) -> None:
    for each in tensors:
        if each.dtype in HALF:
            undo.callback(setattr, each, "data", each.data)
            each.data = each.data.float()


def attend_by(model: PreTrainedModel, implementation: str) -> bool:
    """Set a model's attention implementation. Return False if its class cannot be switched."""
    if model.config._attn_implementation != implementation:  # noqa: SLF001 -- the only place with it
        model.set_attn_implementation(implementation)
    return model.config._attn_implementation == implementation  # noqa: SLF001 -- as above


@contextmanager
def eager_attention(model: PreTrainedModel) -> Generator[None]:
    """Use transformers' eager attention in the block, if the model supports it."""
    chosen = model.config._attn_implementation or "eager"  # noqa: SLF001 -- as above
    attend_by(model, "eager")
    try:
        yield
    finally:
        attend_by(model, chosen)
