"""Wraps a user's staleness policy and checks each of its answers before it is used."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TypeVar, cast

from offbeat.messages.failures import OffbeatError
from offbeat.sampler.policy import Admission, OutstandingGroup, Sampler, View

T = TypeVar("T")


class SamplerBroken(OffbeatError):
    """A custom policy returned something that no run can follow.

    Fix: correct the named method of the sampler.
    """

    target: str
    method: str
    got: str
    allowed: str

    def __str__(self) -> str:
        return f"{self.target}.{self.method} {self.got}; allowed: {self.allowed}"


@dataclass(frozen=True, slots=True)
class CheckedSampler:
    """Wraps the policy ``inner`` and raises ``SamplerBroken`` for any illegal answer.

    The recipe's bound applies to any policy: no group past ``max_staleness`` is ever selected. This
    class cannot check that a policy admits enough groups, or that it eventually selects groups.
    """

    inner: Sampler
    target: str  # its name in the recipe
    max_staleness: int  # [weight versions]
    max_outstanding_groups: int  # [groups]

    def admit(self, view: View) -> Admission | None:
        admission = cast("object", self._call("admit", lambda: self.inner.admit(view)))
        step = view.trainer_version + 1
        if admission is None:
            return None
        if isinstance(admission, Admission):
            target_step = admission.target_step
            if target_step is None or (_is_int(target_step) and target_step >= step):
                return admission
        allowed = f"None, Admission() for any step, or Admission(target_step) from step {step} on"
        raise self._broken("admit", admission, allowed)

    def may_dispatch(self, view: View, group: OutstandingGroup) -> bool:
        may = cast(
            "object", self._call("may_dispatch", lambda: self.inner.may_dispatch(view, group))
        )
        if isinstance(may, bool):
            return may
        raise self._broken("may_dispatch", may, "True or False")

    def select(self, view: View) -> list[int]:
        chosen = self._prompt_indices(
            "select", lambda: self.inner.select(view), "ready", view.ready
        )
        groups_needed, oldest = (
            max(0, view.groups_needed),
            view.trainer_version - self.max_staleness,
        )
        if len(chosen) > groups_needed:
            raise self._broken(
                "select", chosen, f"at most the {groups_needed} groups that the step needs"
            )
        late = [
            prompt_index
            for prompt_index in chosen
            if view.ready[prompt_index].oldest_version < oldest
        ]
        if late:
            allowed = f"groups of version {oldest} or later (max_staleness={self.max_staleness})"
            raise self._broken("select", late, allowed)
        return chosen

    def stale(self, view: View) -> list[int]:
        return self._prompt_indices("stale", lambda: self.inner.stale(view), "ready", view.ready)

    def in_flight_to_cancel(self, view: View, *, predictive: bool) -> list[int]:
        in_flight = {
            prompt_index for groups in view.in_flight_at.values() for prompt_index in groups
        }
        return self._prompt_indices(
            "in_flight_to_cancel",
            lambda: self.inner.in_flight_to_cancel(view, predictive=predictive),
            "in flight",
            in_flight,
        )

    def _prompt_indices(
        self,
        method: str,
        call: Callable[[], Iterable[int]],
        place: str,
        known: Collection[int],
    ) -> list[int]:
        """Check that these are distinct prompt indices of groups at this place, and return them."""
        answer: object = self._call(method, call)
        if not isinstance(answer, list | tuple):
            raise self._broken(method, answer, "a list of prompt indices")
        prompt_indices = list(cast("list[int]", answer))
        strange = [each for each in prompt_indices if not _is_int(each) or each not in known]
        if strange:
            raise self._broken(method, strange, f"prompt indices of groups that are {place}")
        if len(set(prompt_indices)) < len(prompt_indices):
            raise self._broken(method, prompt_indices, "each prompt index once")
        return prompt_indices

    def _call(self, method: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except BaseException as error:  # the policy's own code may raise anything, SystemExit too
            got = f"raised {type(error).__name__}: {error}"
            raise SamplerBroken(self.target, method, got, "an answer") from error

    def _broken(self, method: str, got: object, allowed: str) -> SamplerBroken:
        return SamplerBroken(self.target, method, f"returned {_short(got)}", allowed)


_LONGEST_VALUE = 120


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def _is_int(value: object) -> bool:
    """Return whether this is a plain integer.

    The journal cannot hold a numpy integer, and True is not a prompt index.
    """
    return type(value) is int
