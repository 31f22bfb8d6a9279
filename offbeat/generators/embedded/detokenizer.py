"""The tokenizer of a model directory, for engines that look at text."""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.

from collections.abc import Sequence
from functools import cached_property

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from offbeat.generators.stop_strings import Decode


class Detokenizer:
    """Text of token ids, special tokens included; the tokenizer is loaded at the first call.

    Raises at that call what transformers raises of a directory without a tokenizer: ``OSError`` or
    ``ValueError``.
    """

    def __init__(self, model_path: str, *, trust_remote_code: bool) -> None:
        self._model_path, self._trust_remote_code = model_path, trust_remote_code

    def __call__(self, token_ids: Sequence[int]) -> str:
        return self._decode(token_ids)

    @cached_property
    def _decode(self) -> Decode:
        tokenizer = AutoTokenizer.from_pretrained(
            self._model_path, local_files_only=True, trust_remote_code=self._trust_remote_code
        )
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            backend = tokenizer.backend_tokenizer  # a tenth of the time of the wrapper's own
            return lambda ids: backend.decode(ids, skip_special_tokens=False)
        return tokenizer.decode
