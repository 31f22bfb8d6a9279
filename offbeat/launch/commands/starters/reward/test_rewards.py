"""Tries the reward before a run does: python test_rewards.py, or pytest."""

from rewards import reward

ROW = {"prompt": "2+3=", "answer": 5}


def test_the_answer_is_worth_1_and_anything_else_0() -> None:
    assert reward(ROW, "5") == 1.0
    assert reward(ROW, "5, of course") == 1.0
    assert reward(ROW, "55") == 0.0
    assert reward(ROW, "five") == 0.0
    assert reward(ROW, "") == 0.0


if __name__ == "__main__":
    test_the_answer_is_worth_1_and_anything_else_0()
