"""Labels of tokens by the time of the outputs; vLLM itself is not needed."""

from offbeat.plugins.vllm.outputs import NO_VERSION
from offbeat.plugins.vllm.token_labels import LabelSpan, TokenLabels


def test_tokens_from_before_and_after_a_sync_get_spans_of_their_own() -> None:
    labels = TokenLabels()
    labels.set_label("5", 10.0)
    for before, at_s in enumerate((11.0, 12.0, 13.0)):
        labels.count(("r", 0), before, at_s)
    labels.set_label("6", 20.0)
    labels.count(("r", 0), 3, 21.0)
    labels.count(("r", 0), 4, 22.0)
    assert labels.spans(("r", 0), 5) == [LabelSpan("5", 0, 3), LabelSpan("6", 3, 5)]


def test_tokens_that_arrive_late_keep_the_label_of_their_time() -> None:
    """The reply to a pause may be read before outputs that were sent earlier."""
    labels = TokenLabels()
    labels.set_label("5", 10.0)
    labels.set_label("6", 20.0)
    labels.count(("r", 1), 0, 19.0)
    labels.count(("r", 1), 1, 21.0)
    assert labels.spans(("r", 1), 2) == [LabelSpan("5", 0, 1), LabelSpan("6", 1, 2)]


def test_tokens_before_the_first_label_are_of_no_version() -> None:
    labels = TokenLabels()
    labels.count(("r", 0), 0, 1.0)
    assert labels.spans(("r", 0), 1) == [LabelSpan(NO_VERSION, 0, 1)]


def test_a_sample_without_tokens_and_one_that_ended_have_no_spans() -> None:
    labels = TokenLabels()
    labels.count(("r", 0), 0, 1.0)
    labels.forget("r", 2)
    assert labels.spans(("r", 0), 0) == labels.spans(("r", 1), 0) == []
