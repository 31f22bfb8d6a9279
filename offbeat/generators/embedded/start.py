"""Starts the embedded engine of an actor: model, engine and the loop that runs it."""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import cached_property

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from offbeat.config.base import of_kind
from offbeat.config.sections.generator import EmbeddedGeneratorConfig
from offbeat.generators.embedded.engine import EmbeddedEngine
from offbeat.generators.embedded.model import load_model
from offbeat.generators.end_tokens import end_ids_of, warn_of_end_ids
from offbeat.generators.engine_loop import EngineLoop, StepTurns
from offbeat.generators.spec import EngineSpec
from offbeat.generators.stop_strings import Decode


class Detokenizer:
    """Decoder of token ids to text with special tokens. The first call loads the tokenizer.

    If the directory has no tokenizer, the first call raises the error of transformers: ``OSError``
    or ``ValueError``.
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
            backend = tokenizer.backend_tokenizer  # needs a tenth of the wrapper's time
            return lambda ids: backend.decode(ids, skip_special_tokens=False)
        return tokenizer.decode


LoadModel = Callable[[EngineSpec], PreTrainedModel]


def load_served_model(spec: EngineSpec) -> PreTrainedModel:
    """Load the model of an engine from its files."""
    return load_model(
        spec.model.path,
        getattr(torch, spec.model.dtype),
        of_kind(EmbeddedGeneratorConfig, spec.generator).device,
        trust_remote_code=spec.model.trust_remote_code,
    )


def start_loop(
    spec: EngineSpec,
    incarnation: str,
    steps_in: Executor | None = None,
    load: LoadModel | None = None,
    turns: StepTurns | None = None,
) -> tuple[EngineLoop[EmbeddedEngine], PreTrainedModel]:
    """Load the model of ``spec``. Return the loop of its engine, and the served module.

    Args:
        spec: Specification of the engine.
        incarnation: Unique name of this incarnation of the engine.
        steps_in: Executor with one thread that runs the engine, or None for a new one.
        load: Loads the model, or None to load it from its files.
        turns: Decides when the engine may step, or None if it always may.
    """
    config = of_kind(EmbeddedGeneratorConfig, spec.generator)
    torch.set_num_threads(config.threads)
    model = (load or load_served_model)(spec)
    warn_of_end_ids(spec.model.path, config.sampling.stop_token_ids, config.sampling.stop)
    engine = EmbeddedEngine(
        model,
        name=spec.name,
        incarnation=incarnation,
        eos_token_ids=end_ids_of(spec.model.path),
        max_sequences=config.max_sequences,
        max_model_len=config.max_model_len,
        deterministic=config.deterministic,
        seed=spec.seed,
        device=config.device,
        decode=Detokenizer(spec.model.path, trust_remote_code=spec.model.trust_remote_code),
    )
    return EngineLoop(engine, steps_in, turns), engine.model
