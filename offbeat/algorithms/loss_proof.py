"""Proves properties of a user's loss before a run depends on them, on seeded random tokens.

A trainer may cut a step into microbatches, chunks and ranks in any way, and recomputes parts after
a failure. The result is the same for every cut only if the loss of a token depends on the tokens of
its sequence, and on nothing else. Legend: N tokens, S sequences.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnnecessaryIsInstance=false
# torch declares some functions without types, tensordict the values of ``items`` as tensors only.

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from offbeat.algorithms.custom_loss import CustomLoss, LossRefused, function_tokens
from offbeat.algorithms.losses import with_advantages
from offbeat.algorithms.tokens import LossTokens
from offbeat.config.sections.loss import CustomLossConfig

_LENGTHS: Final = (5, 1, 9, 2, 7)
_SEED: Final = 0
_TRAINED: Final = 0.8  # share of the tokens
_TOLERANCE: Final = 1e-4
"""Maximum difference of float32 results that counts as rounding, relative to the largest value."""

_OWN_SEQUENCE: Final = (
    "Compute a token's loss from its own sequence only: a call has any of the step's sequences. "
    "algorithm.loss.normalize divides by sums over the step, algorithm.loss.step_std by the "
    "deviation of its advantages"
)
_TRAINED_ONLY: Final = "Use tokens.mask_N, or tokens.sequence_sums, which adds up trained tokens"
_ONCE_ONLY: Final = "Use no random numbers, and no state that a call changes"
_NO_CHANGE: Final = "Use operations that return a new value: x = x * 2, not x *= 2 or x.mul_(2)"
_FINITE: Final = "Clamp what exp, log and divisions are computed from, as to -20 and 20"
_GRADIENT: Final = "Compute the loss from tokens.logprobs_N, without detach() around all of it"
_PROPORTIONAL: Final = (
    "Multiply by tokens.advantages_N once, or set algorithm.loss.step_std to false"
)


@dataclass(frozen=True, slots=True)
class _Found:
    """Results by name, [N]: the loss, its gradient, and the function's shown values."""

    by_name: dict[str, Tensor]
    cut: str  # how the tokens were divided into calls


def prove_loss(
    loss: CustomLoss, config: CustomLossConfig, device: torch.device | None = None
) -> None:
    """Prove the properties that a run needs of the user's function, on random tokens.

    The loss must be finite and have a gradient. The function must not change its inputs, and a
    second call must return the same. A token's loss must not depend on other sequences and
    untrained tokens in the call. With ``step_std``, the gradient must be proportional to the
    advantages.

    Raises:
        LossRefused: The function lacks one of these properties. The error names the property, two
            figures and a fix.
    """
    tokens = _random_tokens(config, device or torch.device("cpu"))
    every = list(range(tokens.sequences))
    whole = _results(loss, config, tokens, [every], "in one call")
    _check_values(loss, tokens, whole)
    again = _results(loss, config, tokens, [every], "in a second call")
    _check_same(loss, whole, again, _ONCE_ONLY)
    alone = _results(loss, config, tokens, [[each] for each in every], "with a call per sequence")
    _check_same(loss, whole, alone, _OWN_SEQUENCE)
    turned = _results(loss, config, tokens, [every[::-1]], "with sequences in a different order")
    _check_same(loss, whole, turned, _OWN_SEQUENCE)
    cut = "without the tokens that are not trained"
    trained = _results(loss, config, tokens, [every], cut, trained_only=True)
    _check_same(loss, whole, trained, _TRAINED_ONLY)
    if config.step_std:
        _check_proportional(loss, config, tokens, whole)


def _random_tokens(config: CustomLossConfig, device: torch.device) -> LossTokens:
    """Return tokens like those of a trainer. The first sequence is exactly on policy."""
    rng, total = torch.Generator().manual_seed(_SEED), sum(_LENGTHS)

    def normal(scale: float) -> Tensor:
        """Return random numbers, [N]."""
        return scale * torch.randn(total, generator=rng)

    sequence_N = torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS))
    is_first_of_sequence = torch.diff(sequence_N, prepend=torch.tensor([-1])) > 0
    drifted_N = (sequence_N > 0).float()
    logprobs_N = -2 + normal(0.5)
    old_N = logprobs_N + drifted_N * normal(0.1)
    drawn_N = old_N if config.old_logprobs == "generation" else old_N + drifted_N * normal(0.05)
    advantages_S = torch.tensor([(-1.0) ** each * (1 + each / 3) for each in range(len(_LENGTHS))])
    mask_N = is_first_of_sequence | (torch.rand(total, generator=rng) < _TRAINED)
    reference_N, teacher_N = logprobs_N + normal(0.2), logprobs_N + normal(0.2)
    tokens = LossTokens(
        logprobs_N=logprobs_N,
        old_N=old_N,
        generation_N=drawn_N,
        reference_N=reference_N if config.needs_reference_logprobs else None,
        advantages_N=advantages_S[sequence_N],
        mask_N=mask_N,
        sequence_N=sequence_N,
        sequences=len(_LENGTHS),
        staleness_N=torch.randint(0, 3, (total,), generator=rng),
        teacher_N=teacher_N if config.teacher_path is not None else None,
        entropy_N=1 + torch.rand(total, generator=rng),
    )
    return tokens.to(device)


def _results(
    loss: CustomLoss,
    config: CustomLossConfig,
    tokens: LossTokens,
    calls: Sequence[Sequence[int]],
    cut: str,
    *,
    trained_only: bool = False,
) -> _Found:
    """Call the function for some sequences at a time. Put the results into the tokens' places."""
    found = dict[str, Tensor]()
    for sequences in calls:
        places = _places(tokens, sequences, trained_only=trained_only)
        for name, values_N in _call(loss, config, _pick(tokens, places)):
            zeros_N = torch.zeros_like(tokens.logprobs_N)
            found.setdefault(name, zeros_N)[places] = values_N.detach().to(zeros_N.dtype)
    return _Found(found, cut)


def _places(tokens: LossTokens, sequences: Sequence[int], *, trained_only: bool) -> Tensor:
    """Return the places in [N] of the tokens of some sequences, in the order of the sequences."""
    wanted_N = tokens.mask_N if trained_only else torch.ones_like(tokens.mask_N)
    each = [torch.nonzero((tokens.sequence_N == s) & wanted_N).flatten() for s in sequences]
    return torch.cat(each)


def _pick(tokens: LossTokens, places: Tensor) -> LossTokens:
    """Return the tokens at some places of [N], with sequences renumbered in that order."""
    present, counts = torch.unique_consecutive(tokens.sequence_N[places], return_counts=True)
    of_tokens = {
        name: value[places]
        for name, value in tokens.items()
        if isinstance(value, Tensor) and name != "sequence_N"
    }
    numbers = torch.arange(len(present), device=places.device)
    return replace(
        tokens,
        **of_tokens,
        sequence_N=torch.repeat_interleave(numbers, counts),
        sequences=len(present),
    )


def _call(
    loss: CustomLoss, config: CustomLossConfig, tokens: LossTokens
) -> Iterator[tuple[str, Tensor]]:
    """Yield the function's results and its gradient, [N], with 0 where a token is not trained."""
    logprobs_N = tokens.logprobs_N.clone().requires_grad_()
    leaf = replace(tokens, logprobs_N=logprobs_N)
    given = function_tokens(with_advantages(leaf, config), leaf)
    kept = {
        name: (value, value.detach().clone())
        for name, value in given.items()
        if isinstance(value, Tensor)
    }
    options = copy.deepcopy(config.options)
    values = loss.values(given, options)
    for name, (value, before) in kept.items():
        _check_unchanged(loss, name, value.detach(), before)
    if options != config.options:
        problem = f"it changed its options from {config.options} to {options}"
        raise LossRefused(loss.target, problem, _NO_CHANGE)
    loss_N = torch.where(tokens.mask_N, values.loss_N, 0.0)
    yield "loss", loss_N
    yield "gradient", _gradient(loss, loss_N, logprobs_N)
    for name, shown_N in values.shown_N.items():
        yield f"value {name!r}", torch.where(tokens.mask_N, shown_N, 0)


def _gradient(loss: CustomLoss, loss_N: Tensor, logprobs_N: Tensor) -> Tensor:
    """Return the gradient of the summed loss, [N]. Refuse a loss that has none."""
    gradient_N = None
    if loss_N.requires_grad:
        try:
            (gradient_N,) = torch.autograd.grad(loss_N.sum(), logprobs_N, allow_unused=True)
        except RuntimeError as error:  # torch has no specific class for it
            raise LossRefused(
                loss.target, f"its backward pass raised {error}", _NO_CHANGE
            ) from error
    if gradient_N is None:
        raise LossRefused(loss.target, "its loss has no gradient to logprobs_N", _GRADIENT)
    return gradient_N


def _check_unchanged(loss: CustomLoss, name: str, value_N: Tensor, before_N: Tensor) -> None:
    if not torch.equal(value_N, before_N):
        place = int(torch.nonzero(value_N != before_N)[0])
        problem = (
            f"it changed its input {name} of token {place} from {before_N[place].item():.6g} to "
            f"{value_N[place].item():.6g}"
        )
        raise LossRefused(loss.target, problem, _NO_CHANGE)


def _check_values(loss: CustomLoss, tokens: LossTokens, found: _Found) -> None:
    for name, values_N in found.by_name.items():
        if len(bad := torch.nonzero(~values_N.isfinite())):
            place = int(bad[0])
            problem = (
                f"its {name} of token {place} is {values_N[place].item()} at logprob "
                f"{tokens.logprobs_N[place].item():.6g} and advantage "
                f"{tokens.advantages_N[place].item():.6g}"
            )
            raise LossRefused(loss.target, problem, _FINITE)
    if not found.by_name["gradient"].any():
        count = int(tokens.mask_N.sum())
        problem = f"its gradient is 0 at each of {count} tokens with advantages other than 0"
        raise LossRefused(loss.target, problem, _GRADIENT)


def _check_same(loss: CustomLoss, want: _Found, got: _Found, fix: str) -> None:
    """Refuse results that depend on how the tokens were divided into calls."""
    if want.by_name.keys() != got.by_name.keys():
        names = [sorted(each.by_name.keys() - {"loss", "gradient"}) for each in (want, got)]
        problem = f"it shows {names[0]} {want.cut}, but {names[1]} {got.cut}"
        raise LossRefused(loss.target, problem, fix)
    for name, want_N in want.by_name.items():
        got_N = got.by_name[name]
        if (place := _differs_at(want_N, got_N)) is not None:
            problem = (
                f"its {name} of token {place} is {want_N[place].item():.6g} {want.cut}, but "
                f"{got_N[place].item():.6g} {got.cut}"
            )
            raise LossRefused(loss.target, problem, fix)


def _check_proportional(
    loss: CustomLoss, config: CustomLossConfig, tokens: LossTokens, whole: _Found
) -> None:
    """Refuse a gradient that does not double with the advantages: ``step_std`` divides it."""
    doubled = replace(tokens, advantages_N=2 * tokens.advantages_N)
    got = _results(loss, config, doubled, [list(range(tokens.sequences))], "")
    want_N, got_N = 2 * whole.by_name["gradient"], got.by_name["gradient"]
    if (place := _differs_at(want_N, got_N)) is not None:
        problem = (
            f"with algorithm.loss.step_std=true its gradient has to double with the advantages; that of "
            f"token {place} goes from {want_N[place].item() / 2:.6g} to {got_N[place].item():.6g}"
        )
        raise LossRefused(loss.target, problem, _PROPORTIONAL)


def _differs_at(want_N: Tensor, got_N: Tensor) -> int | None:
    """Return the place of the largest difference, or None if that is only rounding. NaN differs."""
    scale = torch.maximum(want_N.abs().max(), got_N.abs().max())
    error_N = (want_N - got_N).abs().nan_to_num(nan=torch.inf)
    place = int(error_N.argmax())
    return None if error_N[place] <= _TOLERANCE * scale else place
