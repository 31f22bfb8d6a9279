"""Compares the prompts that a run trains on with the prompts that it holds out.

A score on held-out prompts means nothing if the model has been trained on them. Prompts are
compared by digests of 8 bytes, so that a million rows need 8 MB and one sort.
"""

import os
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from offbeat.config.mixture import evaluation_paths, key_in
from offbeat.config.run import RunConfig
from offbeat.environments.inputs import DATA, eval_key
from offbeat.environments.prompt_files import FilePrompts, PromptFileError
from offbeat.environments.prompts import EnvironmentPrompts, MixedPrompts, PromptSource
from offbeat.messages.failures import OffbeatError
from offbeat.messages.text import list_names

ALLOW: Final = "eval.allow_overlap=true"
_NAMED: Final = 20  # rows in a message


class HeldOutTrained(OffbeatError):
    """Rows of an evaluation set give prompts that the run also trains on.

    Fix: use a different file, or set ``eval.allow_overlap=true``.
    """

    key: str  # of the set
    count: int
    rows: int  # of the set
    places: tuple[int, ...]  # of the first such rows in the set
    data_key: str
    data_row: int  # the training row with the prompt of the first of them

    @property
    def problem(self) -> str:
        """Return the message without the fix."""
        more = ", ..." if self.count > len(self.places) else ""
        return (
            f"{self.count} of the {self.rows} rows in {self.key} are prompts that {self.data_key} "
            f"trains on: rows {', '.join(map(str, self.places))}{more}, counted from 0; the first is "
            f"row {self.data_row} of {self.data_key}"
        )

    @property
    def fix(self) -> str:
        """Return the sentence with the fix."""
        return f"Remove them from one of the files, or set {ALLOW} to score them anyway."

    def __str__(self) -> str:
        return f"{self.problem}. {self.fix}"


def check_held_out(
    config: RunConfig, prompts: PromptSource, sets: Mapping[str, PromptSource]
) -> None:
    """Raise if a run over ``prompts`` trains on rows of its evaluation sets.

    Raises:
        HeldOutTrained: The error names the first set with such rows, and their number.
    """
    sources = prompts.sources if isinstance(prompts, MixedPrompts) else {"": prompts}
    trained = {key_in(name, DATA): each for name, each in sources.items()}
    named = {
        key_in(name, eval_key("")) if config.environments else eval_key(name): each
        for name, each in sets.items()
    }
    held = {key: each for key, each in named.items() if key in evaluation_paths(config)}
    for overlap in overlaps(config, _digests(trained), _digests(held)):
        raise overlap


def overlaps(
    config: RunConfig, trained: Mapping[str, "array[int]"], held: Mapping[str, "array[int]"]
) -> Iterator[HeldOutTrained]:
    """Yield each pair of files with common prompts, unless the recipe allows it or trains nothing.

    Args:
        config: The recipe of the run.
        trained: Digests of rows (``FilePrompts.digests``) by the key that names their file.
        held: Digests of the evaluation sets' rows, in the same form.
    """
    if config.eval.allow_overlap or config.trainer.backend == "stub":
        return
    for key, rows in held.items():
        for data_key, data in trained.items():
            is_common = np.isin(np.asarray(rows), np.asarray(data))
            if is_common.any():
                places = np.flatnonzero(is_common)
                named = tuple(map(int, places[:_NAMED]))
                at = data.index(rows[named[0]])
                yield HeldOutTrained(key, len(places), len(rows), named, data_key, at)


def _digests(sources: Mapping[str, PromptSource]) -> dict[str, "array[int]"]:
    plain = {
        key: each.source if isinstance(each, EnvironmentPrompts) else each
        for key, each in sources.items()
    }
    return {key: each.digests for key, each in plain.items() if isinstance(each, FilePrompts)}


_SPLITS: Final = {
    "train": "train(?:ing)?",
    "validation": "validation|valid|val|dev",
    "test": r"test(?:ing)?|eval(?:uation)?|(?:held|hold)[-_]?out",
}
_SPLIT: Final = re.compile(
    r"(?:^|[-._ /\d])(?:"
    + "|".join(f"(?P<{name}>{words})" for name, words in _SPLITS.items())
    + r")(?=$|[-._ /\d])",
    re.IGNORECASE,
)
"""Matches the name of a split in a file name, as the library ``datasets`` does."""


def check_one_split(config: RunConfig, path: str, files: Sequence[Path]) -> None:
    """Raise if a directory or a pattern mixes files of held-out rows with other files.

    Raises:
        PromptFileError: There are several splits. The error names them.
    """
    if len(files) == 1 or config.data.allow_splits:
        return
    top = os.path.commonpath([file.parent for file in files])
    splits = dict[str, list[str]]()
    for file in files:
        name = str(file.relative_to(top))
        found = [each.lastgroup for each in _SPLIT.finditer(name)]
        split = found[-1] if found else None  # train_eval.jsonl is for evaluation
        splits.setdefault(split or "without a name of a split", []).append(name)
    if len(splits) > 1 and splits.keys() & (_SPLITS.keys() - {"train"}):
        each = ", ".join(
            f"{split} ({list_names(names, 1)})" for split, names in sorted(splits.items())
        )
        problem = f"holds files of several splits: {each}"
        fix = "Name the files of one of them; in the name of a file, * stands for any characters"
        raise PromptFileError(path, 0, problem, f"{fix}. data.allow_splits=true reads all of them")
