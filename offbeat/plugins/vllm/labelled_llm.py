"""An ``AsyncLLM`` that reports which weights sampled each token, for vLLM versions before 0.32.

vLLM 0.32 and newer report it themselves, in ``CompletionOutput.weight_versions``.
"""

# pyright: basic, reportMissingImports=false
# vllm lives in an environment of its own (docs/vllm.md).

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor

from offbeat.plugins.vllm.outputs import NO_VERSION
from offbeat.plugins.vllm.token_labels import TokenLabels


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
        """Labels of the output processor. The first use changes the processor's class."""
        if not isinstance(self.output_processor, LabelledOutputs):
            self.output_processor.__class__ = LabelledOutputs
            self.output_processor.labels = TokenLabels()
        return self.output_processor.labels

    def _run_output_handler(self) -> None:
        """Start the output task, which keeps a reference to the output processor."""
        _ = self._labels
        super()._run_output_handler()

    async def update_weight_version(self, new_version: str) -> None:
        """Change the label while decoding is paused. If the call fails, tokens have no version."""
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
