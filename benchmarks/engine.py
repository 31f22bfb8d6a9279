"""Measures how much of a bare decode loop's speed the embedded engine keeps.

Three ways to generate tokens, in one process, interleaved; tokens per second of CPU:

- bare: one batch, one ``DynamicCache``, a Hugging Face forward and a draw per token;
- together: the engine, all requests submitted at once;
- staggered: four waves of requests of different lengths (half to one and a half times the bare
  loop's), each started where another one ended. Towards the end fewer and fewer samples run.

    python -m benchmarks.engine --threads 1
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
from transformers import DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from offbeat.generators.embedded.engine import EmbeddedEngine
from offbeat.messages.generation import GenerateRequest, SamplingParams

PROMPT_TOKENS = 5
MAX_MODEL_LEN = 512


def main() -> None:
    """Measure, and print a table or JSON."""
    options = _parse()
    torch.set_num_threads(options.threads)
    rows = [
        _compare(sequences, options.tokens, options.samples, options.repeats)
        for sequences in options.sequences
    ]
    if options.json:
        json.dump({"threads": options.threads, "tokens": options.tokens, "rows": rows}, sys.stdout)
        sys.stdout.write("\n")
        return
    sys.stdout.write("sequences  bare tok/s  together tok/s  ratio  staggered tok/s  ratio\n")
    for row in rows:
        sys.stdout.write(
            f"{row['sequences']:9d}  {row['bare']:10,.0f}  {row['together']:14,.0f}  "
            f"{row['together_ratio']:5.2f}  {row['staggered']:15,.0f}  {row['staggered_ratio']:5.2f}\n"
        )


def tiny_model() -> PreTrainedModel:
    """Return a model of two layers of width 128 and 64 tokens of vocabulary.

    A step is almost all overhead.
    """
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
    )
    return Qwen3ForCausalLM(config).eval()


def _compare(sequences: int, tokens: int, samples: int, repeats: int) -> dict[str, float]:
    bare_model = tiny_model()
    engine = EmbeddedEngine(
        tiny_model(),
        name="engine",
        incarnation="1",
        eos_token_ids=(),
        max_sequences=sequences,
        max_model_len=MAX_MODEL_LEN,
        deterministic=False,
        seed=0,
        device="cpu",
    )
    ways: dict[str, Callable[[], int]] = {
        "bare": lambda: _bare_loop(bare_model, sequences, tokens),
        "together": lambda: _together(engine, sequences, tokens, samples),
        "staggered": lambda: _staggered(engine, sequences, tokens, samples),
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, run in ways.items():
            began_s = time.process_time()
            done = run()
            if repeat:  # the first one warms up
                speeds[name].append(done / (time.process_time() - began_s))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    return {
        "sequences": sequences,
        **medians,
        "together_ratio": medians["together"] / medians["bare"],
        "staggered_ratio": medians["staggered"] / medians["bare"],
    }


@torch.inference_mode()
def _bare_loop(model: PreTrainedModel, sequences: int, tokens: int) -> int:
    cache = DynamicCache()
    input_ids = torch.randint(0, 64, (sequences, PROMPT_TOKENS))
    for _ in range(tokens):
        output = model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logprobs = torch.log_softmax(output.logits[:, -1].float(), -1)
        input_ids = torch.multinomial(logprobs.exp(), 1)
        logprobs.gather(1, input_ids)
    return sequences * tokens


def _together(engine: EmbeddedEngine, sequences: int, tokens: int, samples: int) -> int:
    before = engine.tokens
    for number in range(sequences // samples):
        engine.submit(_request(number, samples, tokens))
    while engine.has_work:
        engine.step()
    return engine.tokens - before


def _staggered(engine: EmbeddedEngine, sequences: int, tokens: int, samples: int) -> int:
    """Four waves of requests; one starts wherever another ended."""
    before = engine.tokens
    lengths = random.Random(0)
    for number in range(4 * sequences // samples):
        length = lengths.randint(tokens // 2, tokens * 3 // 2)
        engine.submit(_request(number, samples, length))
    while engine.has_work:
        engine.step()
    return engine.tokens - before


def _request(number: int, samples: int, tokens: int) -> GenerateRequest:
    prompt = tuple((number + place) % 64 for place in range(PROMPT_TOKENS))
    return GenerateRequest(str(number), prompt, samples, SamplingParams(max_new_tokens=tokens))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Embedded engine against a bare decode loop.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--tokens", type=int, default=64, help="generated by each sequence")
    parser.add_argument("--samples", type=int, default=4, help="of one request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
