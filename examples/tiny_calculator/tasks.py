"""Make the tasks of the calculator agent: products in words, and the number that is right.

    python -m examples.tiny_calculator.tasks examples/tiny_calculator

Two factors of three digits, or three of two digits. Of the tasks that a seed draws, those held out
share no question with those that are trained.
"""

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

SEED = 0
TRAINED, HELD_OUT = 2000, 200


def make_task(draw: random.Random) -> dict[str, Any]:
    """Return one task: its question, its factors in the order of the question, its answer."""
    low, high, count = draw.choice([(100, 1000, 2), (100, 1000, 2), (10, 100, 3)])
    factors = [draw.randrange(low, high) for _ in range(count)]
    question = f"What is {' times '.join(map(str, factors))}?"
    return {"question": question, "factors": factors, "answer": math.prod(factors)}


def make_tasks(seed: int, count: int) -> list[dict[str, Any]]:
    """Return ``count`` tasks with different questions."""
    draw, by_question = random.Random(seed), dict[str, dict[str, Any]]()
    while len(by_question) < count:
        task = make_task(draw)
        by_question[task["question"]] = task
    return list(by_question.values())


def main() -> None:
    """Write ``tasks.jsonl`` and ``held_out.jsonl`` into the directory named on the command line."""
    parser = argparse.ArgumentParser(description="Make the tasks of the calculator agent.")
    parser.add_argument("directory", type=Path, help="where to write them")
    directory = parser.parse_args().directory

    tasks = make_tasks(SEED, TRAINED + HELD_OUT)
    for name, part in (("tasks", tasks[:TRAINED]), ("held_out", tasks[TRAINED:])):
        rows = [{"question": each["question"], "answer": each["answer"]} for each in part]
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
