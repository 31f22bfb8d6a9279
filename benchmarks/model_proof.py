"""Measures the cost of proving a model when it is loaded: a random one of half a billion weights.

    python -m benchmarks.model_proof --dtype float32 --threads 2

Prints wall and processor seconds of each proof, and how far rounding led.
"""

import argparse
import time
from collections.abc import Callable

import structlog
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from offbeat.generators.embedded import proof as decoding
from offbeat.generators.embedded.model import DecodedModel
from offbeat.models.plain import TOLERANCES
from offbeat.trainers.torch import proof as rows

MAX_MODEL_LEN = 2048


def half_a_billion(dtype: torch.dtype) -> Qwen2ForCausalLM:
    """Qwen2 of 0.5 billion random weights."""
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.fill_(1)
            else:
                weight.uniform_(-0.05, 0.05)
    model.model.rotary_emb = Qwen2RotaryEmbedding(config)  # its frequencies are not parameters
    torch.nn.Module.to(model, dtype)  # in place
    model.set_attn_implementation("sdpa")
    return model.eval()


def timed(name: str, work: Callable[[], object]) -> None:
    """Run and print."""
    wall_s, processor_s = time.perf_counter(), time.process_time()
    work()
    wall_s, processor_s = time.perf_counter() - wall_s, time.process_time() - processor_s
    print(f"{name:<22}{wall_s:6.2f} s wall  {processor_s:6.2f} s processor")


def main() -> None:
    """Time the four proofs of one model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    model = half_a_billion(dtype)
    print(f"{sum(each.numel() for each in model.parameters()):,} weights")
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with torch.no_grad():
        model(input_ids=tokens)  # reads what was written for the first time
        timed("one pass of 8 tokens", lambda: model(input_ids=tokens))
    kind, config, tolerance = type(model), model.config, TOLERANCES[dtype]
    timed(
        "rows, tiny model",
        lambda: rows.prove_kind(kind, config, MAX_MODEL_LEN, shared_prompt=True),
    )
    proof = rows.prove_kind(kind, config, MAX_MODEL_LEN, shared_prompt=True)
    timed("rows, model", lambda: rows.prove_model(model, MAX_MODEL_LEN, proof, dtype, tolerance))
    timed("decoding, tiny model", lambda: decoding.prove_kind(kind, config, MAX_MODEL_LEN))
    decoded = DecodedModel(model)
    timed("decoding, model", lambda: decoding.prove_model(decoded, MAX_MODEL_LEN, tolerance))


if __name__ == "__main__":
    structlog.configure()
    main()
