"""An ``AsyncLLM`` that reports which weights sampled each token, for a vLLM that does not.

vLLM 0.32 and newer report it themselves, in ``CompletionOutput.weight_versions``.

Tells which weights sampled each token, by the time of the outputs.

    engine core    tokens  tokens  pause is answered                     resumed  tokens
    label                                        weights change, label          --------->

Weights change only while decoding is paused, and the new label is set in that pause. So a token is
older than the label exactly if its weights are. Both times are of the machine's monotonic clock.
"""

# pyright: basic, reportMissingImports=false
# vllm lives in an environment of its own (docs/vllm.md).

import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor

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
        """Give tokens from now on this label."""
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
        """Drop what was recorded of a request that has ended."""
        for index in range(samples):
            self._starts.pop((request_id, index), None)


class LabelledOutputs(OutputProcessor):
    """Labels tokens as they arrive, by the time at which the engine core sent them."""

    labels: TokenLabels

    def process_outputs(self, outputs: Sequence[Any], sent_s: float, *others: object) -> Any:  # noqa: ANN401 - vLLM's to define
        for output in outputs:
            state = self.request_states.get(output.request_id)
            if state is not None and output.new_token_ids:
                sample = (state.external_req_id, state.request_index)
                self.labels.count(sample, state.detokenizer.num_output_tokens(), sent_s)
        return super().process_outputs(outputs, sent_s, *others)


class LabelledLLM(AsyncLLM):  # work-around: unlabelled_tokens
    """Sets ``weight_versions`` of each output, as newer versions of vLLM do."""

    @property
    def _labels(self) -> TokenLabels:
        """Labels of the output processor, whose class changes at the first use."""
        if not isinstance(self.output_processor, LabelledOutputs):
            self.output_processor.__class__ = LabelledOutputs
            self.output_processor.labels = TokenLabels()
        return self.output_processor.labels

    def _run_output_handler(self) -> None:
        """Start the task that keeps a reference to the output processor."""
        _ = self._labels
        super()._run_output_handler()

    async def update_weight_version(self, new_version: str) -> None:
        """Change the label while decoding is paused. Without an answer, tokens have no version."""
        self._labels.set_label(NO_VERSION, time.monotonic())
        await super().update_weight_version(new_version)
        self._labels.set_label(new_version, time.monotonic())

    async def generate(
        self,
        prompt: Any,  # noqa: ANN401 - vLLM's to define
        sampling_params: Any,  # noqa: ANN401
        request_id: str,
        **others: object,
    ) -> AsyncGenerator[Any, None]:
        labels = self._labels
        try:
            async with aclosing(
                super().generate(prompt, sampling_params, request_id, **others)
            ) as outputs:
                async for output in outputs:
                    for each in output.outputs:
                        sample = (request_id, each.index)
                        each.weight_versions = labels.spans(sample, len(each.token_ids))
                    yield output
        finally:
            labels.forget(request_id, sampling_params.n)
