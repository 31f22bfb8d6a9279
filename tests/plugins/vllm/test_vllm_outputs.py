"""What a request asks of vLLM; vLLM itself is not needed."""

from offbeat.messages.generation import GenerateRequest, SamplingParams
from offbeat.plugins.vllm.outputs import sampling_arguments


def arguments_of(sampling: SamplingParams) -> dict[str, object]:
    return sampling_arguments(GenerateRequest("r", (1, 2), 2, sampling), end_ids=(9,))


def test_vllm_gets_the_filters_and_stop_strings_of_a_request() -> None:
    sampling = SamplingParams(top_p=0.9, top_k=20, min_p=0.05, stop=("</answer>", "\n\n"))
    arguments = arguments_of(sampling)
    assert (arguments["top_p"], arguments["top_k"], arguments["min_p"]) == (0.9, 20, 0.05)
    assert arguments["stop"] == ["</answer>", "\n\n"]
    assert arguments["detokenize"] is True, "stop strings need text"
    assert arguments["skip_special_tokens"] is False, "a stop string may have a special token"


def test_a_request_without_filters_keeps_every_token_and_needs_no_text() -> None:
    arguments = arguments_of(SamplingParams())
    assert (arguments["top_p"], arguments["top_k"], arguments["min_p"]) == (1.0, 0, 0.0)
    assert (arguments["stop"], arguments["detokenize"]) == ([], False)


def test_a_stop_token_is_no_text_in_which_a_stop_string_could_end() -> None:
    """With vLLM's flag a stop token that spells a stop string would count as the string."""
    arguments = arguments_of(SamplingParams(stop=("<eos>",), stop_token_ids=(4,)))
    assert not arguments.get("include_stop_str_in_output", False)
    assert arguments["stop_token_ids"] == [9, 4]
