import pytest

from offbeat.actors.call import first_line, raised_line

TRACEBACK = """The actor died because of an error raised in its creation task, ray::Actor.__init__()
  File "split_step.py", line 3, in __init__
    raise ValueError(path)
ValueError: models/none holds no weights
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (TRACEBACK, "ValueError: models/none holds no weights"),
        ("nothing that looks like an exception\nsecond", "nothing that looks like an exception"),
        (
            "a.b.c.UnsupportedModel: it cannot be packed",
            "a.b.c.UnsupportedModel: it cannot be packed",
        ),
        ("", "Exception"),
    ],
)
def test_what_was_raised_is_told_in_one_line(text: str, line: str) -> None:
    assert raised_line(Exception(text)) == line


def test_an_error_without_text_is_told_by_its_name() -> None:
    assert first_line(KeyError()) == "KeyError"
