"""Determines which weights sampled each token, by the time of the outputs.

    engine core    tokens  tokens  pause is answered                     resumed  tokens
    label                                        weights change, label          --------->

Weights change only while decoding is paused, and the new label is set in that pause. So a token is
older than the label exactly if its weights are older. Both times are from the machine's monotonic
clock.
"""

from collections import deque
from dataclasses import dataclass

from offbeat.plugins.vllm.outputs import NO_VERSION

Sample = tuple[str, int]
"""Id of a request, and index of one of its samples."""


@dataclass(frozen=True, slots=True)
class LabelSpan:
    """Tokens ``start`` to ``end`` of a sample, drawn under one label. Named as in vLLM."""

    version: str
    start: int
    end: int


class TokenLabels:
    """Labels of the tokens of unfinished samples. Outputs must come in the order of their times."""

    def __init__(self) -> None:
        self._labels = deque([(0.0, NO_VERSION)])
        self._starts = dict[Sample, list[tuple[str, int]]]()

    def set_label(self, label: str, now_s: float) -> None:
        """Label tokens from now on with ``label``."""
        self._labels.append((now_s, label))

    def count(self, sample: Sample, before: int, at_s: float) -> None:
        """Record that a sample has tokens of time ``at_s``, after ``before`` others."""
        while len(self._labels) > 1 and self._labels[1][0] <= at_s:
            self._labels.popleft()
        label, starts = self._labels[0][1], self._starts.setdefault(sample, [])
        if not starts or starts[-1][0] != label:
            starts.append((label, before))

    def spans(self, sample: Sample, tokens: int) -> list[LabelSpan]:
        """Return the spans of a sample of this many tokens."""
        starts = self._starts.get(sample, [])
        ends = [*(start for _, start in starts[1:]), tokens]
        return [
            LabelSpan(label, start, end)
            for (label, start), end in zip(starts, ends[: len(starts)], strict=True)
        ]

    def forget(self, request_id: str, samples: int) -> None:
        """Drop the records of a request that has ended."""
        for index in range(samples):
            self._starts.pop((request_id, index), None)
