"""Log-probabilities of given tokens from logits, and entropies of their distributions.

If tensor-parallel ranks divide the rows of an output head, each rank has the logits of its own
tokens (``VocabularyShare``), and all of them must call a function together. Results are equal on
all ranks, and each rank gets the gradient of its own logits.

Legend: U positions with logits, V vocabulary or this rank's share of it, N tokens, each predicted
by one of the positions, T ranks.

The module also divides the rows of embedding and output head over tensor-parallel ranks. Each rank
has the rows of some tokens. The embedding returns zeros for the tokens of other ranks, and the
ranks add up their results. The head returns the logits of only this rank's tokens. A token's
log-probability and entropy are computed from a few numbers of each rank. So no rank ever holds the
whole matrices or logits.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch declares some functions without types, and transformers its models.
# torch declares some functions without types.

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import embedding, linear, pad
from transformers import PreTrainedModel

from offbeat.weight_sync.region import chunk_cuts

_HEAD: Final = ("colwise_gather_output", "colwise_rep")
"""Names in transformers' plans for dividing an output head by rows."""


@dataclass(frozen=True, slots=True)
class VocabularyShare:
    """The rows of the vocabulary that one of several tensor-parallel ranks holds."""

    cuts: tuple[int, ...]  # first row of each rank, and the end
    rank: int
    group: Any  # process group of these ranks; torch does not type it

    @property
    def first(self) -> int:
        return self.cuts[self.rank]

    @property
    def rows(self) -> int:
        return self.cuts[self.rank + 1] - self.first

    @property
    def most_rows(self) -> int:
        """Return the largest number of rows on any rank, which is the number on the first rank."""
        return self.cuts[1]

    def own(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether tokens belong to this rank, and their rows here (0 for other tokens)."""
        is_own = (tokens >= self.first) & (tokens < self.first + self.rows)
        return is_own, torch.where(is_own, tokens - self.first, 0)

    def add_up(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks. All of them must call it together."""
        return sum_over(values, self.group)

    def stack_ranks(self, values: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked. All ranks must call it together."""
        values = values.contiguous()
        every = [torch.empty_like(values) for _ in self.cuts[1:]]
        dist.all_gather(every, values, group=self.group)
        return torch.stack(every)

    def of_all(self, total_U: Tensor, entropy_U: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return totals and entropies over the whole vocabulary, bit for bit the same on all ranks.

        Args:
            total_U: Logarithms of the sums of the exponentials of this rank's logits.
            entropy_U: Entropies over only this rank's tokens, or None if they are not wanted.
        """
        parts = [total_U] if entropy_U is None else [total_U, entropy_U]
        every_TU, *entropies = self.stack_ranks(torch.stack(parts)).unbind(1)
        whole_U = torch.logsumexp(every_TU, 0)
        if not entropies:
            return whole_U, None
        # Entropy of the ranks' shares, plus each rank's entropy weighted by its share
        own_TU = every_TU - whole_U
        return whole_U, (own_TU.exp() * (entropies[0] - own_TU)).sum(0)


class DividedEmbedding(nn.Module):
    """An embedding with some of its rows on this rank. Its output is complete on all ranks."""

    def __init__(self, weight: nn.Parameter, padding: int | None, share: VocabularyShare) -> None:
        """Create the embedding.

        The row of the token ``padding``, if it is not None, gets no gradient from the embedding.
        """
        super().__init__()
        self.weight, self._share = weight, share
        is_here = padding is not None and 0 <= padding - share.first < share.rows
        self._padding = padding - share.first if padding is not None and is_here else None

    def forward(self, input_ids: Tensor) -> Tensor:
        is_own, row = self._share.own(input_ids)
        found = embedding(row, local_part(self.weight), self._padding)
        own = found.masked_fill(~is_own[..., None], 0.0)
        return AddedUp.apply(own, self._share.add_up)  # pyright: ignore[reportReturnType] -- apply has no type


class DividedHead(nn.Module):
    """An output head with some of its rows on this rank. It returns the logits of their tokens."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, share: VocabularyShare
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.share = weight, bias, share

    def forward(self, hidden: Tensor) -> Tensor:
        bias = None if self.bias is None else local_part(self.bias)
        read: Any = _ReadByAll.apply(hidden, self.share)
        return linear(read, local_part(self.weight), bias)


def sum_over(values: Tensor, group: Any) -> Tensor:  # noqa: ANN401 -- torch does not type groups
    """Return the sum of a tensor over the ranks of a group. All of them must call it together."""
    whole = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, group=group)
    return whole


class AddedUp(torch.autograd.Function):
    """The sum over ranks. Each rank already has the whole gradient, so backward sums nothing."""

    @staticmethod
    def forward(_: Any, values: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:  # noqa: ANN401 -- torch does not type its context
        return add(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401 -- as above
        del ctx
        return gradients[0], None


class _ReadByAll(torch.autograd.Function):
    """A tensor that every rank reads. Its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, share: VocabularyShare) -> Tensor:  # noqa: ANN401 -- as above
        ctx.share = share
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401 -- as above
        return ctx.share.add_up(gradients[0]), None


def vocabulary_modules(model: PreTrainedModel, ranks: int) -> tuple[str, ...]:
    """Return the names of embedding and output head if both can be divided by rows, else nothing.

    This is the case if transformers' plan for the model's class includes the head, every rank gets
    rows, and both modules are plain. If the embedding scales its output, or the head has an
    adapter, both are left whole.
    """
    found, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(found) is not nn.Embedding or type(head) is not nn.Linear or found.max_norm is not None:
        return ()
    names = {each: name for name, each in model.named_modules()}
    plan: dict[str, str] = type(model)._tp_plan or {}  # noqa: SLF001 -- where transformers has it  # pyright: ignore[reportPrivateUsage]
    rows = (found.num_embeddings, head.out_features)
    every_rank_has_some = all(each > (ranks - 1) * -(-each // ranks) for each in rows)
    is_divided = plan.get(names[head]) in _HEAD and every_rank_has_some
    return (names[found], names[head]) if is_divided else ()


def divide_vocabulary(model: PreTrainedModel, mesh: DeviceMesh, names: Sequence[str]) -> None:
    """Divide these modules' rows over the ranks of a mesh, in place. Tied modules stay tied."""
    divided = dict[Tensor, nn.Parameter]()  # by the whole parameter

    def part(whole: Tensor) -> nn.Parameter:
        if whole not in divided:
            rows = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
            divided[whole] = nn.Parameter(rows, requires_grad=whole.requires_grad)
        return divided[whole]

    for name in names:
        whole: Any = model.get_submodule(name)
        cuts = tuple(chunk_cuts(len(whole.weight), mesh.size()))
        share = VocabularyShare(cuts, mesh.get_local_rank(), mesh.get_group())
        parent, _, attribute = name.rpartition(".")
        if isinstance(whole, nn.Embedding):
            made = DividedEmbedding(part(whole.weight), whole.padding_idx, share)
        else:
            bias = None if whole.bias is None else part(whole.bias)
            made = DividedHead(part(whole.weight), bias, share)
        setattr(model.get_submodule(parent), attribute, made)


def find_share(head: nn.Module) -> VocabularyShare | None:
    """Return the share of the vocabulary for which a head returns logits, or None for all."""
    return head.share if isinstance(head, DividedHead) else None


def largest_of_all(logits_UV: Tensor, count: int, share: VocabularyShare) -> tuple[Tensor, Tensor]:
    """Return the largest logprobs [U, count] over all ranks, in descending order, and tokens."""
    count = min(count, share.cuts[-1])
    whole_U, _ = share.of_all(torch.logsumexp(logits_UV, -1), None)
    kept = logits_UV.topk(min(count, share.rows), -1)
    missing = (0, count - kept.values.shape[-1])  # on a rank with fewer tokens
    logits_TUK = share.stack_ranks(pad(kept.values, missing, value=-math.inf))
    tokens_TUK = share.stack_ranks(pad(kept.indices + share.first, missing))
    logits_UK, tokens_UK = (each.transpose(0, 1).flatten(1) for each in (logits_TUK, tokens_TUK))
    best = logits_UK.topk(count, -1)
    return best.values - whole_U[:, None], tokens_UK.gather(-1, best.indices)


def local_part(parameter: Tensor) -> Tensor:
    """Return this rank's rows, with their whole gradient. Data ranks gather the rows."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


_IN_A_CACHE: Final = 1 << 20
_ON_A_GPU: Final = 1 << 26
"""Number of logits that are processed at a time."""

NEVER: Final = -1e4
"""Logarithm used for minus infinity. Its ``exp`` is 0 in every dtype, and 0 times it is 0."""


def token_logprobs(
    logits_UV: Tensor,
    which_N: Tensor,
    target_N: Tensor,
    temperature: float,
    share: VocabularyShare | None = None,
) -> Tensor:
    """Compute ``log softmax(logits / temperature)[which, target]`` in natural logs.

    Backward allocates one buffer of the size and dtype of the logits. Autograd would allocate
    several in float32. All other buffers of both passes cover a few rows at a time.

    Args:
        logits_UV: [U, V] floating.
        which_N: [N] int64: index of the position that predicts each token. Positions may repeat.
        target_N: [N] int64: token ids.
        temperature: Temperature of the softmax.
        share: The share of the vocabulary that the logits cover, or None for all of it.

    Returns:
        [N] float32, or float64 for float64 logits.
    """
    return _TokenLogprobs.apply(logits_UV, which_N, target_N, temperature, False, share)[0]  # noqa: FBT003 -- apply takes no names  # pyright: ignore[reportIndexIssue, reportOptionalSubscript, reportReturnType]


def token_logprobs_and_entropies(
    logits_UV: Tensor,
    which_N: Tensor,
    target_N: Tensor,
    temperature: float,
    share: VocabularyShare | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``token_logprobs``, and the entropy of the distribution of each token.

    Entropies are ``-sum p log p`` with ``p = softmax(logits / temperature)``, [N] in nats. They are
    computed in the same slices of the logits as the logprobs. So neither pass needs another buffer
    as large as the logits. Both results have a gradient.
    """
    return _TokenLogprobs.apply(logits_UV, which_N, target_N, temperature, True, share)  # noqa: FBT003 -- as above  # pyright: ignore[reportReturnType]


def largest_logprobs(
    logits_UV: Tensor, count: int, share: VocabularyShare | None = None
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[float, ...], ...]]:
    """Return the ``count`` most probable tokens of each row of [U, V] logits, and their logprobs.

    Both are in descending order of the logprobs (natural log).
    """
    wide_UV = logits_UV.to(torch.promote_types(logits_UV.dtype, torch.float32))
    if share is None:
        kept = torch.log_softmax(wide_UV, -1).topk(min(count, logits_UV.shape[-1]), -1)
        tokens, logprobs = kept.indices.tolist(), kept.values.tolist()
    else:
        largest_UK, tokens_UK = largest_of_all(wide_UV, count, share)
        tokens, logprobs = tokens_UK.tolist(), largest_UK.tolist()
    return tuple(map(tuple, tokens)), tuple(map(tuple, logprobs))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- torch does not type what it saves on it
        logits_UV: Tensor,
        which_N: Tensor,
        target_N: Tensor,
        temperature: float,
        with_entropies: bool,  # noqa: FBT001 -- apply takes no names
        share: VocabularyShare | None,
    ) -> tuple[Tensor, Tensor | None]:
        parts_U = [
            _total_and_entropy(scale(logits_UV[rows], temperature), with_entropies=with_entropies)
            for rows in _rows(logits_UV)
        ]
        total_U = torch.cat([total_U for total_U, _ in parts_U])
        entropy_U = None
        if with_entropies:
            entropy_U = torch.cat([each_U for _, each_U in parts_U if each_U is not None])
        is_own_N = None
        if share is not None:
            total_U, entropy_U = share.of_all(total_U, entropy_U)
            is_own_N, target_N = share.own(target_N)
        ctx.save_for_backward(logits_UV, total_U, which_N, target_N, entropy_U, is_own_N)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        wanted_N = scale(logits_UV[which_N, target_N], temperature)
        if share is not None and is_own_N is not None:
            wanted_N = share.add_up(torch.where(is_own_N, wanted_N, 0))
        logprobs_N = wanted_N - total_U[which_N]
        return logprobs_N, None if entropy_U is None else entropy_U[which_N]

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 -- as above
        *grads: Tensor | None,
    ) -> tuple[Tensor, None, None, None, None, None]:
        logits_UV, total_U, which_N, target_N, entropy_U, is_own_N = ctx.saved_tensors
        grad_N, entropy_grad_N = grads
        if grad_N is None:
            grad_N = total_U.new_zeros(len(which_N))
        pull_U = None
        if entropy_grad_N is not None:
            pull_U = torch.zeros_like(total_U).index_add_(0, which_N, entropy_grad_N)
        grad_U = torch.zeros_like(total_U).index_add_(0, which_N, grad_N)
        if is_own_N is not None:  # other ranks have the logits of the other tokens
            grad_N = torch.where(is_own_N, grad_N, 0)
        grad_UV = torch.empty_like(logits_UV)
        is_wide = grad_UV.dtype == total_U.dtype
        for rows in _rows(logits_UV):
            scaled_UV = scale(logits_UV[rows], ctx.temperature)
            part_UV = torch.sub(
                scaled_UV, total_U[rows, None], out=grad_UV[rows] if is_wide else None
            )
            if pull_U is None:
                part_UV.exp_().mul_(-grad_U[rows, None])
            else:
                # d entropy / d logit = -p (log p + entropy)
                slope_UV = part_UV.clamp_(min=NEVER) + entropy_U[rows, None]
                slope_UV.mul_(pull_U[rows, None]).add_(grad_U[rows, None])
                part_UV.exp_().mul_(slope_UV).neg_()
            place_N = (which_N - rows.start) * part_UV.shape[1] + target_N
            add_N = grad_N
            if len(part_UV) < len(logits_UV):
                # Tokens of other rows add zero. Selecting them would synchronise with the GPU
                here_N = (which_N >= rows.start) & (which_N < rows.stop)
                place_N, add_N = torch.where(here_N, place_N, 0), torch.where(here_N, add_N, 0)
            part_UV.view(-1).index_add_(0, place_N, add_N)
            if ctx.temperature != 1:
                part_UV.div_(ctx.temperature)
            if not is_wide:
                grad_UV[rows] = part_UV
        return grad_UV, None, None, None, None, None


def _total_and_entropy(scaled_UV: Tensor, *, with_entropies: bool) -> tuple[Tensor, Tensor | None]:
    """Return the log-sum-exp [U] of each row, and the entropy [U] of its softmax."""
    if not with_entropies:
        return torch.logsumexp(scaled_UV, -1), None
    largest_U = scaled_UV.amax(-1, keepdim=True)
    shifted_UV = (scaled_UV - largest_U).clamp_(min=NEVER)
    share_UV = shifted_UV.exp()
    sum_U = share_UV.sum(-1)
    mean_U = share_UV.mul_(shifted_UV).sum(-1) / sum_U
    return sum_U.log() + largest_U[:, 0], sum_U.log() - mean_U


def _rows(logits_UV: Tensor) -> Iterator[slice]:
    places, vocabulary = logits_UV.shape
    at_once = _IN_A_CACHE if logits_UV.device.type == "cpu" else _ON_A_GPU
    size = max(1, at_once // vocabulary)
    return (slice(first, min(first + size, places)) for first in range(0, max(1, places), size))


def scale(logits: Tensor, temperature: float) -> Tensor:
    """Return ``logits / temperature`` in float32 or wider."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide if temperature == 1 else wide / temperature
