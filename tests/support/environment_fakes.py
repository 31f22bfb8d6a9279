"""A tokenizer of characters, and engines that answer at once."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams
from offbeat.messages.groups import Prompt, RolloutTask, VersionSpans
from offbeat.testing.environments import make_result

EOS_ID = 0
SAMPLING = SamplingParams(max_new_tokens=8)


class CharTokenizer:
    """Token ``i`` is character ``i``; 0 is the end of the sequence."""

    eos_token_id: int | None = EOS_ID

    def __len__(self) -> int:
        return 128

    def get_vocab(self) -> dict[str, int]:
        return {chr(id_): id_ for id_ in range(len(self))}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        del add_special_tokens  # it adds none
        return [ord(char) for char in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        kept = [i for i in token_ids if not (skip_special_tokens and i == EOS_ID)]
        return "".join("</s>" if i == EOS_ID else chr(i) for i in kept)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self.decode([token_id]) for token_id in ids]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
        **options: Any,
    ) -> Any:
        assert not (return_dict or options)
        text = self.written(conversation, opens_answer=add_generation_prompt)
        return self.encode(text) if tokenize else text

    def written(self, conversation: Sequence[Mapping[str, Any]], *, opens_answer: bool) -> str:
        """Return a conversation as text. Tokenizers with another template override this."""
        turns = "".join(f"{turn['role']}:{turn['content']};" for turn in conversation)
        return turns + "assistant:" * opens_answer


class PartsTokenizer(CharTokenizer):
    """Writes the texts of lists of parts alone, as SmolVLM's chat template does."""

    def written(self, conversation: Sequence[Mapping[str, Any]], *, opens_answer: bool) -> str:
        texts = [
            {**turn, "content": "".join(p["text"] for p in turn["content"] if "text" in p)}
            for turn in conversation
        ]
        return super().written(texts, opens_answer=opens_answer)


class OpensThought(CharTokenizer):
    """A chat template that begins the assistant's turn inside of a thought."""

    def written(self, conversation: Sequence[Mapping[str, Any]], *, opens_answer: bool) -> str:
        turns = super().written(conversation, opens_answer=opens_answer)
        return turns + "<think>\n" * opens_answer


def task(
    data: dict[str, Any] | None = None, *, samples: int = 2, prompt_index: int = 7
) -> RolloutTask:
    prompt = Prompt(prompt_index, 0, prompt_index, data or {"prompt": "3+4=", "answer": 7})
    return RolloutTask(prompt, 1, samples, "engine-0", 11, 60.0)


def result(
    request_id: str,
    texts: Sequence[str],
    *,
    spans: Sequence[VersionSpans] | None = None,
    finish: str = "stop",
    kept_kv: tuple[int, ...] = (),
) -> GenerateResult:
    """Each text followed by the end of sequence, unless ``finish`` says it was cut."""
    ids = [[ord(char) for char in text] + [EOS_ID] * (finish == "stop") for text in texts]
    return make_result(
        request_id,
        ids,
        finish_reasons=(finish,) * len(ids),
        version_spans=tuple(spans or [((3, len(sample)),) for sample in ids]),
        kept_kv=kept_kv,
    )


def answers(*texts: str, **options: Any) -> Callable[[GenerateRequest], Awaitable[GenerateResult]]:
    """An engine that gives the same texts to every request."""

    async def generate(request: GenerateRequest) -> GenerateResult:
        return result(request.request_id, texts, **options)

    return generate
