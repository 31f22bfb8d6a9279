"""Export of the weights of a causal LM to a Hugging Face directory, as they are gathered."""

# pyright: reportPrivateUsage=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs and its functions untyped. Private names are explained where they are
# used.

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from offbeat.trainers.checkpoints.model_directory import replaced
from offbeat.trainers.checkpoints.weight_files import FILE_BYTES, write_weights
from offbeat.trainers.ranks.peers import Peers, write_on_first_rank
from offbeat.trainers.torch.model import unfilled_model
from offbeat.weight_sync.chunks import tied_names

_GENERATION_CONFIG: Final = "generation_config.json"
_TOKENS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")


def save_model(
    weights: Iterable[tuple[str, Tensor]],
    model: PreTrainedModel,
    dtype: torch.dtype,
    target: Path,
    like: Path,
    peers: Peers,
    *,
    file_bytes: int = FILE_BYTES,
    beside: Callable[[Path], None] = lambda _: None,
) -> None:
    """Write weights, config and ``like``'s tokenizer to ``target``, atomically. All ranks call it.

    The files are those of ``save_pretrained``. Rank 0 writes them; it holds the tensors of one file,
    and those that it gathers next. An existing directory is replaced.

    Args:
        weights: Whole weights by name, in the order of ``named_weights``; all ranks gather them.
        model: The trained model, of which this rank may hold a part, and which may have adapters.
        dtype: Dtype of the model.
        target: The directory that is written.
        like: Directory of the model that was trained.
        peers: The ranks that gather.
        file_bytes: Most bytes of a file of weights.
        beside: Writes further files into the directory before it gets its name.

    Raises:
        OSError: The disk of rank 0 failed, and what was at ``target`` is unchanged.
        PeerFailed: Rank 0 failed.
    """

    def write(gathered: Iterator[tuple[str, Tensor]]) -> None:
        shell = _shell_like(model, dtype)
        with replaced(target, like) as staged, _plain_generation_config(shell):
            shell.save_pretrained(staged, state_dict={})  # config and code, no file of weights
            write_weights(_as_in_files(gathered, shell), staged, file_bytes)
            beside(staged)
            if (like / _GENERATION_CONFIG).is_file():  # the original is exported as it is
                (staged / _GENERATION_CONFIG).unlink(missing_ok=True)

    write_on_first_rank(peers, "the export", weights, write)


def _shell_like(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a whole model without memory, which says how the weights of ``model`` are saved."""
    shell = unfilled_model(model.config, dtype, trust_remote_code=bool(model.is_remote_code()))
    shell.generation_config = model.generation_config
    # Weights that were renamed on loading are renamed back on saving.
    shell._weight_conversions = model._weight_conversions  # noqa: SLF001
    return shell


@contextmanager
def _plain_generation_config(model: PreTrainedModel) -> Generator[None]:
    """Make transformers accept the model's generation config for writing.

    transformers loads configs that it refuses to write, such as a temperature without sampling; at
    the end of a run, the refusal would lose the model.
    """
    kept = model.generation_config
    tokens = {name: getattr(kept, name, None) for name in _TOKENS}
    model.generation_config = GenerationConfig(**tokens)
    try:
        yield
    finally:
        model.generation_config = kept


def _as_in_files(
    weights: Iterable[tuple[str, Tensor]], shell: PreTrainedModel
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors under the names and in the form of transformers' files, weight by weight.

    Where a tensor of the files is made of several weights, all weights are held.

    Raises:
        KeyError, ValueError: The weights are not those of ``shell``.
    """
    names = _saved_names(shell)
    paired = zip(names, weights, strict=True)
    named = ((name, tensor) for _, (first, tensor) in paired for name in names[first])
    if not _are_converted_alone(shell, names):
        yield from revert_weight_conversion(shell, dict(named)).items()
        return
    for name, tensor in named:
        yield from revert_weight_conversion(shell, {name: tensor}).items()


def _saved_names(shell: PreTrainedModel) -> dict[str, list[str]]:
    """Return by its first name the names that each weight is saved under: of tied ones, one.

    transformers chooses it, by the memory of tensors: here each weight has some of its own.
    """
    tied = tied_names(shell)
    ignored = shell._keys_to_ignore_on_save or ()  # noqa: SLF001 -- what its own saving reads
    state = dict[str, Tensor]()
    for names in tied.values():
        state |= dict.fromkeys((each for each in names if each not in ignored), torch.empty(1))
    kept = remove_tied_weights_from_state_dict(state, shell)
    return {first: [each for each in names if each in kept] for first, names in tied.items()}


def _are_converted_alone(shell: PreTrainedModel, names: Mapping[str, list[str]]) -> bool:
    """Return whether each weight gives the tensors of its files without the others."""
    state = shell.state_dict()
    saved = {each: state[each] for kept in names.values() for each in kept}

    def shapes(tensors: Mapping[str, Tensor]) -> Counter[tuple[str, tuple[int, ...]]]:
        found = revert_weight_conversion(shell, dict(tensors))
        return Counter((name, tuple(each.shape)) for name, each in found.items())

    alone = sum((shapes({name: each}) for name, each in saved.items()), Counter())
    return alone == shapes(saved)
