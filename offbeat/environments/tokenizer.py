"""Finds and loads the tokenizer of a model."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.

from pathlib import Path
from typing import Any, Final, NamedTuple

from offbeat.config.run import RunConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.doors import import_object
from offbeat.messages.delayed_interrupt import delay_interrupt

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
)
"""Files of a model directory that hold the vocabulary of its tokenizer. One of them suffices."""


class TokenizerClass(NamedTuple):
    """Class of transformers that ``AutoTokenizer`` chooses for a model."""

    module: str
    name: str


_chosen: Final[dict[ModelConfig, TokenizerClass]] = {}


def find_tokenizer_files(model_path: str | Path) -> list[Path]:
    """Return the files of a model directory that hold the vocabulary of its tokenizer."""
    files = (Path(model_path) / name for name in TOKENIZER_FILES)
    return [each for each in files if each.is_file()]


def load_tokenizer(config: RunConfig, chosen: TokenizerClass | None = None) -> Any:  # noqa: ANN401 -- a tokenizer of transformers, or None
    """Load the tokenizer of the model. Return None for a stub environment, which needs none.

    Args:
        config: The recipe.
        chosen: Result of ``chosen_class`` in another process. ``AutoTokenizer`` imports torch to
            choose the class. The class itself does not import torch.
    """
    if config.environment.name == "stub":
        return None
    model = config.model
    if chosen is not None:
        try:
            kind = import_object(f"{chosen.module}:{chosen.name}")
        except (ImportError, AttributeError):
            pass  # this machine has a different version of transformers
        else:
            return kind.from_pretrained(model.path, local_files_only=True)
    with delay_interrupt():  # it imports torch
        from transformers import AutoTokenizer  # noqa: PLC0415 - seconds; a stub never uses it

    tokenizer = AutoTokenizer.from_pretrained(
        model.path, local_files_only=True, trust_remote_code=model.trust_remote_code
    )
    kind = tokenizer.__class__
    if kind.__module__.startswith("transformers."):  # it is not code of the model
        _chosen[model] = TokenizerClass(kind.__module__, kind.__name__)
    return tokenizer


def chosen_class(config: RunConfig) -> TokenizerClass | None:
    """Return the class of the tokenizer if this process has loaded it, else None."""
    return _chosen.get(config.model)
