"""Make ``models/tiny-calculator``: a causal language model that half knows how to use a calculator.

    python -m examples.tiny_calculator.make_model models/tiny-calculator

Qwen3 with random weights, a byte-level tokenizer with a chat template in the manner of Qwen, and a
short supervised run on conversations about products, *What is 471 times 263?* In two of five the
assistant calls the calculator for each multiplication and answers with its last result; in the
others it guesses a number. So a sample drawn at temperature 1 is right about one time in three:
what is left to learn is to call, and to copy numbers without a slip.

Seeds, thread count and kernels are fixed; another machine's rounding may differ. Nothing is
downloaded.

Legend: B rows, T tokens, V vocabulary.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from transformers import (
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from examples.tiny_calculator.calculator import CALCULATOR, calculate
from examples.tiny_calculator.tasks import make_task, make_tasks

SEED = 0
LOWEST_ACCURACY, HIGHEST_ACCURACY = 0.3, 0.42
"""Outside of these the recipe would have too little to start from, or too little left to show."""

BATCH_ROWS = 32
CHECK_SEED, CHECK_TASKS = 1000, 128

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, START, END)
TAGS = ("<tool_call>", "</tool_call>")
VOCABULARY_SIZE = 512
"""At most: the merges of one conversation are fewer."""

IGNORED_LABEL = -100
"""Labels with this value are left out of the loss; the number is Hugging Face's convention."""

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{%- else %}
{{- message.content + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


class Stretch(NamedTuple):
    """A part of the supervised run."""

    steps: int
    learning_rate: float
    last_learning_rate: float  # it falls to this in a straight line
    uses_calculator: float  # share of the demonstrations that call it; the others guess


STRETCHES = (
    Stretch(360, 2e-3, 2e-3, uses_calculator=0.5),  # learns to copy numbers
    Stretch(160, 1e-3, 0.0, uses_calculator=0.4),  # learns to copy them without slips
)

Message = dict[str, Any]
Task = dict[str, Any]


class Batch(NamedTuple):
    """Conversations, padded on the left."""

    token_ids_BT: Tensor
    attention_mask_BT: Tensor
    labels_BT: Tensor
    """What the assistant says, each turn with its end token; ``IGNORED_LABEL`` elsewhere."""


def solution(task: Task) -> list[Message]:
    """Return the conversation in which every multiplication is the calculator's."""
    return [{"role": "user", "content": task["question"]}, *_calls(task["factors"])]


def _calls(factors: list[int]) -> Iterator[Message]:
    result = str(factors[0])
    for factor in factors[1:]:
        arguments = {"expression": f"{result}*{factor}"}
        function = {"name": "calculator", "arguments": arguments}
        yield {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
        result = calculate(json.dumps(arguments))
        yield {"role": "tool", "content": result}
    yield {"role": "assistant", "content": result}


def demonstration(task: Task, draw: random.Random, uses_calculator: float) -> list[Message]:
    """Return a solution, or a guess of as many digits as the answer has."""
    question, *turns = solution(task)
    if draw.random() < uses_calculator:
        return [question, *turns]
    digits = len(str(task["answer"]))
    guess = draw.randrange(10 ** (digits - 1), 10**digits)
    return [question, {"role": "assistant", "content": str(guess)}]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer whose merges come from one conversation.

    A digit is always a token of its own, so that numbers are copied digit by digit.
    """
    characters = Tokenizer(BPE())
    characters.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    characters.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        show_progress=False,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        special_tokens=list(SPECIAL),
    )
    conversation = solution(make_task(random.Random(SEED)))
    text = str(
        _with_template(characters).apply_chat_template(
            conversation, tools=[CALCULATOR], tokenize=False
        )
    )
    for token in (*SPECIAL, *TAGS):
        text = text.replace(token, "\0")
    characters.train_from_iterator(text.split("\0"), trainer)
    characters.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return _with_template(characters)


def _with_template(characters: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(vocabulary_size: int) -> Qwen3ForCausalLM:
    """Random float32 weights; every id the model can draw is a token."""
    config = Qwen3Config(
        vocab_size=vocabulary_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.06,  # the usual 0.02 suits models ten times as wide
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=SPECIAL.index(PAD),
        eos_token_id=SPECIAL.index(END),
        bos_token_id=None,
        dtype=torch.float32,
    )
    return Qwen3ForCausalLM(config)


def make_batch(tokenizer: PreTrainedTokenizerBase, conversations: list[list[Message]]) -> Batch:
    """Render conversations with the chat template and label what the assistant says."""
    encoded: Any = tokenizer.apply_chat_template(
        conversations,
        tools=[CALCULATOR],
        return_dict=True,
        return_assistant_tokens_mask=True,
        padding=True,
        return_tensors="pt",
    )
    token_ids_BT = encoded["input_ids"]
    is_answer_BT = torch.as_tensor(encoded["assistant_masks"]).bool()
    labels_BT = token_ids_BT.masked_fill(~is_answer_BT, IGNORED_LABEL)
    return Batch(token_ids_BT, encoded["attention_mask"], labels_BT)


@torch.no_grad()
def sampled_accuracy(model: Qwen3ForCausalLM, batch: Batch) -> float:
    """Probability that a sample drawn at temperature 1 is the solution, mean over ``batch``.

    Computed, not sampled. The true accuracy is a little higher: factors may change places.
    """
    logits_BTV = model(input_ids=batch.token_ids_BT, attention_mask=batch.attention_mask_BT).logits
    logprobs_BTV = logits_BTV[:, :-1].log_softmax(dim=-1)
    targets_BT = batch.labels_BT[:, 1:]
    is_answer_BT = targets_BT != IGNORED_LABEL
    logprobs_BT = logprobs_BTV.gather(-1, targets_BT.clamp(min=0)[..., None]).squeeze(-1)
    return (logprobs_BT * is_answer_BT).sum(dim=-1).exp().mean().item()


def warm_start(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> float:
    """Train on demonstrations; returns the ``sampled_accuracy`` on tasks that are not among them.

    Raises:
        RuntimeError: It is outside ``LOWEST_ACCURACY .. HIGHEST_ACCURACY``.
    """
    for seed, stretch in enumerate(STRETCHES, SEED):
        train(model, tokenizer, stretch, random.Random(seed))
    others = make_tasks(CHECK_SEED, CHECK_TASKS)
    accuracy = sampled_accuracy(model, make_batch(tokenizer, [solution(task) for task in others]))
    if not LOWEST_ACCURACY <= accuracy <= HIGHEST_ACCURACY:
        message = (
            f"accuracy {accuracy:.3f} is outside {LOWEST_ACCURACY}..{HIGHEST_ACCURACY}: "
            "change STRETCHES"
        )
        raise RuntimeError(message)
    return accuracy


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    stretch: Stretch,
    draw: random.Random,
) -> None:
    """Take the steps of a stretch, with an optimizer of its own."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=stretch.learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(
        optimizer,
        start_factor=1.0,
        end_factor=stretch.last_learning_rate / stretch.learning_rate,
        total_iters=stretch.steps,
    )
    for _ in range(stretch.steps):
        tasks = [make_task(draw) for _ in range(BATCH_ROWS)]
        demonstrations = [demonstration(task, draw, stretch.uses_calculator) for task in tasks]
        batch = make_batch(tokenizer, demonstrations)
        loss = model(
            input_ids=batch.token_ids_BT,
            attention_mask=batch.attention_mask_BT,
            labels=batch.labels_BT,
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def main() -> None:
    """Write the directory named on the command line, and one line about what is in it."""
    parser = argparse.ArgumentParser(description="Make a tiny causal LM that half uses a tool.")
    parser.add_argument("directory", type=Path, help="where to write it")
    directory = parser.parse_args().directory

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    accuracy = warm_start(model, tokenizer)

    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps({"parameters": parameters, "accuracy": round(accuracy, 4)}))


if __name__ == "__main__":
    main()
