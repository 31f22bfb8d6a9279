"""A tokenizer of bytes, without files."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and the special tokens of ChatML."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: at for at, each in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ("<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens(
        [AddedToken(each, special=True, normalized=False) for each in special]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
