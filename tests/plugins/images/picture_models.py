"""Processors of model families, tiny and written to a folder: no model, a tokenizer of characters."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

CHARACTERS = "0123456789 abcdefghijklmnopqrstuvwxyz=?\n<>-_"


def tokenizer(specials: list[str], **options: Any) -> PreTrainedTokenizerFast:
    vocabulary = ["<pad>", "<eos>", "<unk>", *CHARACTERS]
    ids = {token: id_ for id_, token in enumerate(vocabulary)}
    inner = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        **options,
    )
    made.add_special_tokens({"additional_special_tokens": specials})
    return made


def write_qwen(folder: Path, model_type: str) -> Any:
    """Write image processor and tokenizer of a Qwen-VL; return the library's whole processor."""
    images = Qwen2VLImageProcessorPil(
        patch_size=8, merge_size=2, temporal_patch_size=2, min_pixels=16 * 16, max_pixels=64 * 64
    )
    text = tokenizer(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"])
    for each in (images, text):
        each.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))

    class OfPictures(Qwen3VLProcessor):
        """The library's processor, of whose parts the one for videos need not be there."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    return OfPictures(images, text, None)


def write_gemma3(folder: Path) -> Any:
    """Write the processor of a Gemma 3; return it."""
    text = tokenizer(
        [],
        extra_special_tokens={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
    )
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    whole = Gemma3Processor(images, text, image_seq_length=4)
    whole.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    return whole
