"""Weights to sync, and what a trainer computes with them."""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from offbeat.messages.generation import GenerateResult
from offbeat.messages.weights import Canary, WeightRelease
from offbeat.trainers.torch.logprobs import largest_logprobs
from offbeat.weight_sync.canary import KEPT, TOLERANCE_FLOAT32, prompts
from offbeat.weight_sync.manifest import Manifest, digest_bytes, release_digest
from tests.support.plain_modules import ModuleSource

TINY = Path(__file__).parents[2] / "models" / "tiny-addition"
CHUNK_BYTES = 200_000  # eight chunks
TWO_CHUNKS = 1_000_000


@dataclass(frozen=True)
class Weights:
    """A model and its release."""

    model: PreTrainedModel
    release: WeightRelease

    def worst_error(self, prompt: tuple[int, ...], result: GenerateResult) -> float:
        """Largest difference between a logprob of the engine and this model's, in nats."""
        return max(float(np.abs(gap).max()) for gap in self.errors(prompt, result))

    def errors(self, prompt: tuple[int, ...], result: GenerateResult) -> list[NDArray[np.float32]]:
        """Engine minus model, for each token of each sample."""
        gaps = list[NDArray[np.float32]]()
        for start, end in pairwise(result.offsets.tolist()):
            tokens = [*prompt, *result.token_ids[start:end].tolist()]
            with torch.no_grad():
                logits = self.model(torch.tensor([tokens])).logits[0]
            logprobs = logits.float().log_softmax(-1)[len(prompt) - 1 : -1]
            drawn = torch.tensor(tokens[len(prompt) :])[:, None]
            gaps.append(result.logprobs[start:end] - logprobs.gather(1, drawn)[:, 0].numpy())
        return gaps


@cache
def weights(version: int, chunk_bytes: int = CHUNK_BYTES, model: Path = TINY) -> Weights:
    """Version 0 is the model of the repository; each other one is far from it, and from the rest."""
    module = AutoModelForCausalLM.from_pretrained(model, local_files_only=True, dtype=torch.float32)
    move_to(version, module)
    source = ModuleSource(module.eval(), chunk_bytes)
    packed = [chunk.copy() for chunk, _ in source.chunks()]
    return Weights(module, released(version, source.manifest, packed, canary_of(module)))


@torch.no_grad()
def move_to(version: int, module: PreTrainedModel) -> None:
    """Make the weights of a version of those of the repository."""
    noise = torch.Generator().manual_seed(version)
    if version:
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=noise))


def released(
    version: int,
    manifest: Manifest,
    chunks: list[NDArray[np.uint8]],
    canary: Canary | None = None,
) -> WeightRelease:
    """A release of exactly these bytes."""
    sealed = manifest.seal([digest_bytes(chunk) for chunk in chunks])
    digest = release_digest(sealed, sealed.chunk_digests)
    sealed = msgspec.structs.replace(sealed, canary=canary)
    return WeightRelease(version, digest, sealed, tuple(chunks), sealed.nbytes, canary)


@torch.no_grad()
def canary_of(module: PreTrainedModel) -> Canary:
    """What a trainer that holds this model puts into its release."""
    asked = prompts(module.config.vocab_size)
    logits = module(torch.tensor(asked)).logits[:, -1]
    return Canary(asked, *largest_logprobs(logits, KEPT), TOLERANCE_FLOAT32)


def tied_model(folder: Path) -> Path:
    """A tiny model with biases whose output head is its embedding, and without an end."""
    if not folder.is_dir():
        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
        }
        heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = Qwen2Config(
            vocab_size=100, **sizes, **heads, tie_word_embeddings=True, eos_token_id=None
        )
        model = Qwen2ForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_()
        model.save_pretrained(folder)
    return folder
