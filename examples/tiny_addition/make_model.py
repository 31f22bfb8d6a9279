"""Make ``models/tiny-addition``: a causal language model small enough to learn a+b= while you watch.

    python examples/tiny_addition/make_model.py models/tiny-addition

Qwen3 with random weights, taught by a short supervised run on ``a+b=`` (0 <= a, b < 20) and stopped
as soon as a sample drawn at temperature 1 is right about a quarter of the time: often enough that most
prompt groups mix right and wrong answers, seldom enough that reinforcement learning has work to do.

Seeds, thread count and kernels are fixed, so one machine always writes the same bytes; another
machine's rounding may differ. About ten seconds on one core; nothing is downloaded.

Legend: B rows, T tokens, V vocabulary.
"""

import argparse
import json
import random
import string
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SEED = 0
OPERAND_END = 20
"""Operands are drawn from ``range(OPERAND_END)``."""

TARGET_ACCURACY = 0.25
HIGHEST_ACCURACY = 0.33
"""Above this the quickstart would have too little left to show."""

BATCH_ROWS = 64
LEARNING_RATE = 1e-3
MAX_STEPS = 2000

PAD, EOS, BOS, UNK = "<pad>", "<eos>", "<bos>", "<unk>"
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
VOCABULARY = (PAD, EOS, BOS, UNK, *CHARACTERS)
PAD_ID, EOS_ID, BOS_ID = (VOCABULARY.index(token) for token in (PAD, EOS, BOS))
IGNORED_LABEL = -100
"""Labels with this value are left out of the loss; the number is Hugging Face's convention."""

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class Problem(NamedTuple):
    """One addition and the only completion that counts as right."""

    prompt: str
    answer: str


class Batch(NamedTuple):
    """Problems with their answers, padded on the right."""

    token_ids_BT: Tensor
    attention_mask_BT: Tensor
    labels_BT: Tensor
    """The answer and its end-of-sequence token; ``IGNORED_LABEL`` elsewhere."""


def all_problems() -> list[Problem]:
    """Every problem of the task, in a fixed order."""
    return [
        Problem(prompt=f"{a}+{b}=", answer=str(a + b))
        for a, b in product(range(OPERAND_END), repeat=2)
    ]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; nothing is added in front of or behind a text.

    Byte-pair encoding without a single merge is exactly that, spaces and newlines included.
    """
    vocab = {token: index for index, token in enumerate(VOCABULARY)}
    characters = Tokenizer(BPE(vocab=vocab, merges=[], unk_token=UNK))
    characters.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model() -> Qwen3ForCausalLM:
    """Random float32 weights; every id the model can draw is a token."""
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.06,  # the usual 0.02 suits models ten times as wide
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=BOS_ID,
        dtype=torch.float32,
    )
    return Qwen3ForCausalLM(config)


def make_batch(tokenizer: PreTrainedTokenizerBase, problems: list[Problem]) -> Batch:
    """Rows of ``prompt answer <eos>``, labelled where the answer stands."""
    prompts = [tokenizer.encode(problem.prompt) for problem in problems]
    answers = [tokenizer.encode(problem.answer + EOS) for problem in problems]
    lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    shape = (len(problems), max(lengths))
    token_ids_BT = torch.full(shape, PAD_ID)
    labels_BT = torch.full(shape, IGNORED_LABEL)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        token_ids_BT[row, : lengths[row]] = torch.tensor(prompt + answer)
        labels_BT[row, len(prompt) : lengths[row]] = torch.tensor(answer)
    attention_mask_BT = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    return Batch(token_ids_BT, attention_mask_BT.long(), labels_BT)


@torch.no_grad()
def sampled_accuracy(model: Qwen3ForCausalLM, batch: Batch) -> float:
    """Probability that a sample drawn at temperature 1 is right, mean over the rows of ``batch``.

    Computed, not sampled: only one completion is right, so its probability is the accuracy.
    """
    logits_BTV = model(input_ids=batch.token_ids_BT, attention_mask=batch.attention_mask_BT).logits
    logprobs_BTV = logits_BTV[:, :-1].log_softmax(dim=-1)
    targets_BT = batch.labels_BT[:, 1:]
    is_answer_BT = targets_BT != IGNORED_LABEL
    logprobs_BT = logprobs_BTV.gather(-1, targets_BT.clamp(min=0)[..., None]).squeeze(-1)
    return (logprobs_BT * is_answer_BT).sum(dim=-1).exp().mean().item()


def warm_start(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> tuple[int, float]:
    """Train until ``sampled_accuracy`` reaches the target; returns the steps taken and the accuracy.

    Raises:
        RuntimeError: The accuracy reached is outside ``TARGET_ACCURACY .. HIGHEST_ACCURACY``.
    """
    problems = all_problems()
    everything = make_batch(tokenizer, problems)
    draw = random.Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    step, accuracy = 0, sampled_accuracy(model, everything)
    while accuracy < TARGET_ACCURACY and step < MAX_STEPS:
        batch = make_batch(tokenizer, draw.choices(problems, k=BATCH_ROWS))
        loss = model(
            input_ids=batch.token_ids_BT,
            attention_mask=batch.attention_mask_BT,
            labels=batch.labels_BT,
        ).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        accuracy = sampled_accuracy(model, everything)
    if not TARGET_ACCURACY <= accuracy <= HIGHEST_ACCURACY:
        message = (
            f"accuracy {accuracy:.3f} after {step} steps is outside "
            f"{TARGET_ACCURACY}..{HIGHEST_ACCURACY}: raise MAX_STEPS, or lower LEARNING_RATE"
        )
        raise RuntimeError(message)
    return step, accuracy


def main() -> None:
    """Write the directory named on the command line, and one line about what is in it."""
    parser = argparse.ArgumentParser(description="Make a tiny causal LM that half knows addition.")
    parser.add_argument("directory", type=Path, help="where to write it")
    parser.add_argument(
        "--random", action="store_true", help="leave the weights random, for speed measurements"
    )
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    model = make_model()
    steps, accuracy = (0, 0.0) if arguments.random else warm_start(model, tokenizer)

    tokenizer.save_pretrained(arguments.directory)
    model.save_pretrained(arguments.directory)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps({"parameters": parameters, "steps": steps, "accuracy": round(accuracy, 4)}))


if __name__ == "__main__":
    main()
