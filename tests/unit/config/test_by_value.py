"""Code that is given by value has a name of its own, and reaches a child process."""

import subprocess
import sys
import threading
from pathlib import Path

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]
import msgspec
import pytest

from offbeat.config.by_value import (
    CannotBeSent,
    PackedValue,
    digest_in_name,
    give,
    is_by_value,
    pack,
)
from offbeat.config.user_code import TargetNotFound, load_target

WEIGHT = 3


def helper(response: str) -> int:
    return WEIGHT * len(response)


def reward(row: dict[str, int], response: str) -> float:
    return float(row["bonus"] + helper(response))


def test_a_target_names_the_function_and_its_code() -> None:
    target = give(reward)
    assert is_by_value(target) and ":reward-" in target
    assert give(reward) == target
    assert give(helper) != target
    assert load_target(target, Path())({"bonus": 1}, "four") == reward({"bonus": 1}, "four")


def test_what_is_given_stays_what_it_was_at_that_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    bonus = [1]

    def changing(row: dict[str, int], response: str) -> float:
        return float(bonus[0] + helper(response))

    before = give(changing)
    bonus[0] = 100
    monkeypatch.setitem(globals(), "WEIGHT", 1000)
    after = give(changing)
    assert after != before
    for target, expected in ((before, 1 + 3 * 4), (after, 100 + 1000 * 4)):
        (packed,) = pack([target])
        assert load_target(target, Path())({}, "four") == expected
        assert cloudpickle.loads(packed.pickled)({}, "four") == expected


def test_a_process_that_was_not_given_it_says_how_to_give_it() -> None:
    missing = "offbeat.by_value:reward-000000000000"
    with pytest.raises(TargetNotFound, match=r"pass it again, as reward="):
        load_target(missing, Path())
    assert pack([missing, "rewards:exact"]) == ()


def test_a_child_gets_the_code_of_a_module_that_it_cannot_import() -> None:
    (packed,) = pack([give(reward)])
    child = (
        "import sys, msgspec\n"
        "from pathlib import Path\n"
        "from offbeat.config.by_value import PackedValue, unpack\n"
        "from offbeat.config.user_code import load_target\n"
        "packed = msgspec.json.decode(sys.stdin.buffer.read(), type=PackedValue)\n"
        "unpack([packed])\n"
        "print(load_target(packed.target, Path())({'bonus': 1}, 'four'))\n"
    )
    alone = PackedValue(packed.target, packed.pickled, paths=())
    answer = subprocess.run(
        [sys.executable, "-P", "-c", child],
        input=msgspec.json.encode(alone),
        capture_output=True,
        check=True,
        cwd="/",
        env={"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert answer.stdout == b"13.0\n"


def test_what_no_other_process_can_have_is_refused_by_name() -> None:
    lock = threading.Lock()

    def locked(row: dict[str, int], response: str) -> float:
        with lock:
            return float(len(response) + len(row))

    with pytest.raises(CannotBeSent, match=r"locked cannot be sent .*_thread\.lock"):
        give(locked)


def test_the_digest_in_a_name_is_that_of_its_code() -> None:
    target = give(reward)
    assert digest_in_name(target) == target[-12:]
