"""The queue's index under any writes in any order, repeated and late ones too."""

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from offbeat.transfer_queue.index import QueueIndex, StaleHandle

PROMPT_INDEX = st.integers(0, 3)
COLUMNS = st.sets(st.sampled_from(["response_ids", "rewards", "logprobs"]), min_size=1)
SIZE = st.integers(0, 1000)


@dataclass
class Held:
    attempt: int
    put: set[str]
    added: set[str] = field(default_factory=set[str])
    payloads: list[tuple[int, object]] = field(default_factory=list[tuple[int, object]])  # bytes

    @property
    def columns(self) -> set[str]:
        return self.put | self.added


class IndexMoves(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = QueueIndex()
        self.model = dict[int, Held]()
        self.writes = 0

    def _payload(self) -> str:
        self.writes += 1
        return f"payload-{self.writes}"

    @rule(prompt_index=PROMPT_INDEX, attempt=st.integers(1, 4), columns=COLUMNS, size=SIZE)
    def put(self, prompt_index: int, attempt: int, columns: set[str], size: int) -> None:
        """Only a newer attempt than the one held; what a cleared group had is forgotten."""
        stored, payload = self.model.get(prompt_index), self._payload()
        if stored is not None and attempt <= stored.attempt:
            with pytest.raises(StaleHandle) as refused:
                self.index.put(prompt_index, attempt, columns, size, payload)
            assert refused.value.present == stored.attempt
            return
        self.index.put(prompt_index, attempt, columns, size, payload)
        self.model[prompt_index] = Held(attempt, set(columns), payloads=[(size, payload)])

    @rule(
        prompt_index=PROMPT_INDEX, off=st.sampled_from([0, 0, 0, -1, 1]), columns=COLUMNS, size=SIZE,
        times=st.integers(1, 2),
    )  # fmt: skip
    def add_columns(
        self, prompt_index: int, off: int, columns: set[str], size: int, times: int
    ) -> None:
        """Only to the very attempt held; once, however often it is asked."""
        stored, payload = self.model.get(prompt_index), self._payload()
        attempt = (stored.attempt if stored else 1) + off
        for _ in range(times):
            if stored is None or off:
                with pytest.raises(StaleHandle) as refused:
                    self.index.add_columns(prompt_index, attempt, columns, size, payload)
                assert refused.value.present == (stored.attempt if stored else None)
            else:
                self.index.add_columns(prompt_index, attempt, columns, size, payload)
                if columns - stored.columns:
                    stored.added |= columns
                    stored.payloads.append((size, payload))

    @rule(prompt_indices=st.lists(PROMPT_INDEX))
    def drop_added(self, prompt_indices: list[int]) -> None:
        stored = [prompt_index for prompt_index in prompt_indices if prompt_index in self.model]
        self.index.drop_added(stored)
        for prompt_index in stored:
            self.model[prompt_index].added = set()
            del self.model[prompt_index].payloads[1:]

    @rule(prompt_indices=st.lists(PROMPT_INDEX))
    def clear(self, prompt_indices: list[int]) -> None:
        """Also what is not there, and the same one twice."""
        self.index.clear(prompt_indices)
        for prompt_index in prompt_indices:
            self.model.pop(prompt_index, None)

    @invariant()
    def it_holds_what_was_written_last(self) -> None:
        for prompt_index in range(4):
            stored = self.model.get(prompt_index)
            assert (prompt_index in self.index) == (stored is not None)
            if stored is not None:
                assert self.index.payloads(prompt_index) == tuple(p for _, p in stored.payloads)

    @invariant()
    def bytes_held_are_those_of_the_groups_held(self) -> None:
        sizes = [size for stored in self.model.values() for size, _ in stored.payloads]
        assert self.index.bytes_held == sum(sizes)


TestIndexMoves = IndexMoves.TestCase
