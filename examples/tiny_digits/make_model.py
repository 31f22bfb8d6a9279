"""Make ``models/tiny-digits``: an image-text model small enough to learn to read digits while you watch.

    python examples/tiny_digits/make_model.py models/tiny-digits

Idefics3 with random weights, taught by a short supervised run on pictures of 32 x 32 pixels with one
digit somewhere in them, and stopped as soon as a sample drawn at temperature 1 is right a little more
often than one time in four: most prompt groups then mix right and wrong answers.

Seeds, thread count and kernels are fixed, so one machine always writes the same bytes; another
machine's rounding may differ. About twenty seconds on one core; nothing is downloaded. Needs Pillow.

Legend: B rows, T tokens, V vocabulary.
"""

import argparse
import json
import string
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from offbeat.plugins.images.digits import SIDE, picture

SEED = 0
TARGET_ACCURACY = 0.25
HIGHEST_ACCURACY = 0.30
"""Above this the recipe would have too little left to show."""

BATCH_ROWS = 64
HELD_OUT_ROWS = 512
LEARNING_RATE = 1e-3
MAX_STEPS = 2000

PATCH = 8
SCALE_FACTOR = 2
PLACEHOLDERS: Final = (SIDE // PATCH // SCALE_FACTOR) ** 2
"""Tokens that one picture takes in a prompt."""

PAD, EOS, BOS, UNK = "<pad>", "<eos>", "<bos>", "<unk>"
AROUND, IMAGE, END_OF_UTTERANCE, WHOLE = (
    "<fake_token_around_image>",
    "<image>",
    "<end_of_utterance>",
    "<global-img>",
)
SPECIAL = (PAD, EOS, BOS, UNK, AROUND, IMAGE, END_OF_UTTERANCE, WHOLE)
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
VOCABULARY = (*SPECIAL, *CHARACTERS)
PAD_ID, EOS_ID, BOS_ID = (VOCABULARY.index(token) for token in (PAD, EOS, BOS))
PROMPT = [AROUND, WHOLE, *[IMAGE] * PLACEHOLDERS, AROUND, "="]
"""The tokens that ``Idefics3Processor`` makes of ``<image>=``."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


class Batch(NamedTuple):
    """Pictures, and rows of prompt, digit and end of sequence."""

    pixels_B: Tensor  # [B, 1, 3, SIDE, SIDE]: one picture per row, normalised to -1 .. 1
    token_ids_BT: Tensor


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; nothing is added in front of or behind a text."""
    vocab = {token: index for index, token in enumerate(VOCABULARY)}
    characters = Tokenizer(BPE(vocab=vocab, merges=[], unk_token=UNK))
    characters.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        unk_token=UNK,
        additional_special_tokens=[AROUND, IMAGE, END_OF_UTTERANCE, WHOLE],
        padding_side="left",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_processor() -> Idefics3Processor:
    """A picture is scaled to ``SIDE`` x ``SIDE`` and never cut into tiles."""
    tokenizer = make_tokenizer()
    pictures = Idefics3ImageProcessorPil(
        size={"longest_edge": SIDE},
        max_image_size={"longest_edge": SIDE},
        do_image_splitting=False,
    )
    return Idefics3Processor(
        image_processor=pictures,
        tokenizer=tokenizer,
        image_seq_len=PLACEHOLDERS,
        chat_template=CHAT_TEMPLATE,
    )


def make_model() -> Idefics3ForConditionalGeneration:
    """Random float32 weights; every id the model can draw is a token."""
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.06}
    ids = {"pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "bos_token_id": BOS_ID}
    config = Idefics3Config(
        image_token_id=VOCABULARY.index(IMAGE),
        scale_factor=SCALE_FACTOR,
        tie_word_embeddings=False,
        text_config={
            "model_type": "llama",
            "vocab_size": len(VOCABULARY),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            **layers,
            **ids,
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "image_size": SIDE,
            "patch_size": PATCH,
            **layers,
        },
        pad_token_id=PAD_ID,
        dtype=torch.float32,
    )
    return Idefics3ForConditionalGeneration(config)


def make_batch(first: int, rows: int, seed: int = SEED) -> Batch:
    """Rows of the pictures with these indices."""
    drawn = [picture(seed, index) for index in range(first, first + rows)]
    gray = torch.from_numpy(np.stack([each.pixels for each in drawn])) / 127.5 - 1
    pixels_B = gray[:, None, None].expand(-1, 1, 3, -1, -1)
    ids = {token: index for index, token in enumerate(VOCABULARY)}
    prompt = [ids[token] for token in PROMPT]
    rows_of_ids = [[*prompt, ids[str(each.digit)], EOS_ID] for each in drawn]
    return Batch(pixels_B, torch.tensor(rows_of_ids))


def answer_logits(model: Idefics3ForConditionalGeneration, batch: Batch) -> Tensor:
    """Logits [B, 2, V] of the digit and of the end of the sequence."""
    logits_BTV = model(
        input_ids=batch.token_ids_BT,
        attention_mask=torch.ones_like(batch.token_ids_BT),
        pixel_values=batch.pixels_B,
    ).logits
    return logits_BTV[:, len(PROMPT) - 1 : -1]


@torch.no_grad()
def sampled_accuracy(model: Idefics3ForConditionalGeneration, batch: Batch) -> float:
    """Probability that a sample drawn at temperature 1 is right, mean over the rows of ``batch``.

    Computed, not sampled: only one completion is right, so its probability is the accuracy.
    """
    targets_B2 = batch.token_ids_BT[:, len(PROMPT) :]
    logprobs_B2V = answer_logits(model, batch).log_softmax(-1)
    logprobs_B2 = logprobs_B2V.gather(-1, targets_B2[..., None])[..., 0]
    return logprobs_B2.sum(1).exp().mean().item()


def warm_start(model: Idefics3ForConditionalGeneration) -> tuple[int, float]:
    """Train until ``sampled_accuracy`` reaches the target; returns the steps taken and the accuracy.

    Raises:
        RuntimeError: The accuracy reached is outside ``TARGET_ACCURACY .. HIGHEST_ACCURACY``.
    """
    held_out = make_batch(0, HELD_OUT_ROWS, seed=SEED + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    step, accuracy = 0, sampled_accuracy(model, held_out)
    while accuracy < TARGET_ACCURACY and step < MAX_STEPS:
        batch = make_batch(step * BATCH_ROWS, BATCH_ROWS)
        logits_B2V = answer_logits(model, batch)
        targets = batch.token_ids_BT[:, len(PROMPT) :].reshape(-1)
        torch.nn.functional.cross_entropy(logits_B2V.flatten(0, 1), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        accuracy = sampled_accuracy(model, held_out)
    if not TARGET_ACCURACY <= accuracy <= HIGHEST_ACCURACY:
        message = (
            f"accuracy {accuracy:.3f} after {step} steps is outside "
            f"{TARGET_ACCURACY}..{HIGHEST_ACCURACY}: raise MAX_STEPS, or lower LEARNING_RATE"
        )
        raise RuntimeError(message)
    return step, accuracy


def main() -> None:
    """Write the directory named on the command line, and one line about what is in it."""
    parser = argparse.ArgumentParser(
        description="Make a tiny image-text model that half reads digits."
    )
    parser.add_argument("directory", type=Path, help="where to write it")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    torch.manual_seed(SEED)
    model = make_model()
    steps, accuracy = warm_start(model)

    make_processor().save_pretrained(arguments.directory)
    model.save_pretrained(arguments.directory)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps({"parameters": parameters, "steps": steps, "accuracy": round(accuracy, 4)}))


if __name__ == "__main__":
    main()
