import pytest

from offbeat.actors.call import first_line, raised_line

TRACEBACK = """The actor died because of an error raised in its creation task, ray::Actor.__init__()
  File "split_step.py", line 3, in __init__
    raise ValueError(path)
ValueError: models/none holds no weights
"""

CHAINED = """The actor died because of an error raised in its creation task, ray::Actor.__init__()
    import vllm
ModuleNotFoundError: No module named 'vllm'

The above exception was the direct cause of the following exception:

ray::Actor.__init__() (pid=1, ip=10.0.0.1)
  File "lazy_import.py", line 3, in load_library
    raise VllmMissing(str(error)) from error
a.b.VllmMissing: vLLM cannot be imported. Install it
"""
OF_MANY_LINES = """  File "main.py", line 1, in __init__
    Model.model_validate({})
pydantic_core.ValidationError: 2 validation errors for Model
steps
  Field required
model
  Field required
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (CHAINED, "a.b.VllmMissing: vLLM cannot be imported. Install it"),
        (OF_MANY_LINES, "pydantic_core.ValidationError: 2 validation errors for Model"),
        ("    assert False\nAssertionError", "AssertionError"),
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
