"""Starts the embedded engine of an actor: model, engine and the loop that drives it."""

import torch
from transformers import PreTrainedModel

from offbeat.config.base import of_kind
from offbeat.config.sections.generator import EmbeddedGeneratorConfig
from offbeat.generators.embedded.detokenizer import Detokenizer
from offbeat.generators.embedded.engine import EmbeddedEngine
from offbeat.generators.embedded.model import load_model
from offbeat.generators.end_tokens import end_ids_of, warn_of_end_ids
from offbeat.generators.engine_loop import EngineLoop
from offbeat.generators.spec import EngineSpec


def started(spec: EngineSpec, incarnation: str) -> tuple[EngineLoop, PreTrainedModel]:
    """Load the model of ``spec``. Return the loop of its engine, and the module that is served."""
    config = of_kind(EmbeddedGeneratorConfig, spec.generator)
    torch.set_num_threads(config.threads)
    model = load_model(
        spec.model.path,
        getattr(torch, spec.model.dtype),
        config.device,
        trust_remote_code=spec.model.trust_remote_code,
    )
    warn_of_end_ids(spec.model.path, config.sampling.stop_token_ids)
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
    return EngineLoop(engine), engine.model
