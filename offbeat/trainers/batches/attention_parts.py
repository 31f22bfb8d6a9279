"""Parts of a flat row, each of which attends causally to keys that are listed for it. Pure.

A part describes attention without a mask of tokens squared. The trainers derive parts from the prompt
groups of a flat row, or from the segments of padded rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.trainers.batches.packing import PromptTree


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """Queries, and the keys to which their last one attends; each query before attends to one less.

    The last slice of keys ends with one key per query.
    """

    queries: slice
    keys: tuple[slice, ...]


def list_tree_parts(trees: Sequence[PromptTree]) -> list[AttentionPart]:
    """Return the parts of a flat row of whole groups: prompts, and branches behind their prompt."""
    parts = list[AttentionPart]()
    for tree in trees:
        if tree.is_one_sequence:
            parts.append(AttentionPart(tree.whole, (tree.whole,)))
            continue
        parts.append(AttentionPart(tree.prompt, (tree.prompt,)))
        parts += [AttentionPart(branch, (tree.prompt, branch)) for branch in tree.branches]
    return parts
