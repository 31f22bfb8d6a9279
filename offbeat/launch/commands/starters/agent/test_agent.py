"""Tries the tool before a run does: python test_agent.py, or pytest."""

from agent import multiply


def test_a_product_is_computed_and_anything_else_is_an_answer_to_the_model() -> None:
    assert multiply('{"expression": "47*83"}') == "3901"
    assert multiply('{"expression": "47 plus 83"}') == "error: write a*b"
    assert multiply("{}") == "error: write a*b"


if __name__ == "__main__":
    test_a_product_is_computed_and_anything_else_is_an_answer_to_the_model()
