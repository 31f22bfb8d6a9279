"""Reward functions of users, good and bad: what the killable children are tested with."""

import asyncio
import os
import signal
import sys
import time
from typing import Any, NoReturn

from offbeat.environments.frames import RewardReply, frame_message
from offbeat.environments.reward_value import NamedRewards

Row = dict[str, Any]
PLAIN = 1.0


def length(prompt: Row, response: str, *, scale: float = 1.0) -> float:
    return len(response) * scale + prompt.get("offset", 0)


def thought_in_tags(prompt: Row, response: str) -> float:
    return float(response == "<think>2+2 is 4</think>5")


def whole(prompt: Row, response: str) -> int:
    return len(response)


def answered(prompt: Row, response: str) -> Any:
    """Reward of a function that names answers, but of an empty response none."""
    if not response:
        return 0.0
    answer = None if response == "?" else response
    return {"reward": float(response == "7"), "answer": answer}


def with_other_keys(prompt: Row, response: str) -> dict[str, Any]:
    return {"answer": "7", "format": 1.0, "reward": 1.0}


def with_a_number(prompt: Row, response: str) -> dict[str, Any]:
    return {"answer": 7, "reward": 1.0}


def raises(prompt: Row, response: str) -> float:
    if response == "bad":
        raise KeyError("answer")
    return 1.0


def none(prompt: Row, response: str) -> None:
    return None


def not_a_number(prompt: Row, response: str) -> float:
    return float(response)


def text(prompt: Row, response: str) -> str:
    return "1.0"


def boolean(prompt: Row, response: str) -> bool:
    return True


def for_letters(prompt: Row, response: str) -> float | None:
    return 1.0 if response.isalpha() else None


def listed(prompt: Row, response: str) -> list[float]:
    return [1.0]


def leaves(prompt: Row, response: str) -> NoReturn:
    os._exit(3)


def hangs(prompt: Row, response: str) -> float:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while response == "hang":
        time.sleep(60)
    return 1.0


def announces_and_hangs(prompt: Row, response: str) -> float:
    os.write(1, f"{os.getpid()}\n".encode())  # in one piece, though two processes share the pipe
    time.sleep(60)
    return 1.0


def slow(prompt: Row, response: str) -> float:
    time.sleep(0.5)
    return 1.0


async def waits(prompt: Row, response: str) -> float:
    await asyncio.sleep(float(response))
    return 1.0


def eats_memory(prompt: Row, response: str) -> float:
    return float(len(bytearray(10 << 30)))


def chatters(prompt: Row, response: str) -> float:
    for _ in range(1000):
        print("x" * 1000)  # noqa: T201 - that is what it is for
    os.write(1, b"y" * 100_000)
    sys.stdout.flush()
    return 1.0


def forks_and_hangs(prompt: Row, response: str) -> float:
    if os.fork() == 0:
        time.sleep(60)
    with open(prompt["pid_file"], "w") as file:  # noqa: PTH123
        file.write(str(os.getpgid(0)))
    time.sleep(60)
    return 1.0


def quotes(prompt: Row, response: str, *, times: int) -> float:
    raise ValueError((response or "\udcff") * times)


def forks(prompt: Row, response: str) -> float:
    os.fork()  # and both go on
    return len(response)


def forks_and_scores_less_in_the_fork(prompt: Row, response: str) -> float:
    if os.fork() == 0:
        return 0.25
    os.wait()  # the fork comes back first
    return 0.75


def exits(prompt: Row, response: str) -> NoReturn:
    sys.exit(2)


def interrupts(prompt: Row, response: str) -> NoReturn:
    raise KeyboardInterrupt


async def exits_at_once(prompt: Row, response: str) -> NoReturn:
    sys.exit(2)


def counts_calls_in_its_row(prompt: Row, response: str) -> float:
    prompt["seen"].append(response)
    return float(len(prompt["seen"]))


async def counts_calls_at_once(prompt: Row, response: str) -> float:
    return counts_calls_in_its_row(prompt, response)


def forges(prompt: Row, response: str, *, sample: int = 0, empty: bool = False) -> float:
    answer = frame_message(RewardReply(1, sample, None if empty else NamedRewards(1.0, {})))
    os.write(int(sys.argv[1]), answer)
    return 1.0
