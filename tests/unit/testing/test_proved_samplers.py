"""The proof of a sampler accepts policies of offbeat and refuses broken ones."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from offbeat.messages.failures import OffbeatError
from offbeat.sampler.build import SamplerNotLoaded
from offbeat.sampler.checked_sampler import SamplerBroken
from offbeat.sampler.in_order import InOrder
from offbeat.sampler.policy import Admission, OutstandingGroup, View
from offbeat.sampler.ready_first import ReadyFirst, WeightFifo
from offbeat.sampler.windowed import Windowed
from offbeat.testing import SamplerRefused, prove_sampler


class NeverSelects(ReadyFirst):
    def select(self, view: View) -> list[int]:
        del view
        return []


class LetsAllGo(ReadyFirst):
    def may_dispatch(self, view: View, group: OutstandingGroup) -> bool:
        del view, group
        return True


class AdmitsWithoutEnd(LetsAllGo):
    def admit(self, view: View) -> Admission | None:
        del view
        return Admission()


class HoldsWhatItAdmits(ReadyFirst):
    def may_dispatch(self, view: View, group: OutstandingGroup) -> bool:
        del view, group
        return False


class SelectsWhatIsTooOld(LetsAllGo):
    def select(self, view: View) -> list[int]:
        return list(view.ready)[: max(0, view.groups_needed)]

    def admit(self, view: View) -> Admission | None:
        return Admission() if view.outstanding < 4 else None


class DrawsForTheFirstStepOnly(ReadyFirst):
    def admit(self, view: View) -> Admission | None:
        return Admission() if view.trainer_version == 0 and view.outstanding < 2 else None


@pytest.mark.parametrize("policy", [ReadyFirst, WeightFifo])
def test_a_paced_policy_of_offbeat_is_accepted(policy: Callable[..., Any]) -> None:
    prove_sampler(policy, runs=60)
    prove_sampler(policy, groups_per_step=1, max_staleness=0, runs=60)


@pytest.mark.parametrize(
    ("policy", "options"),
    [(InOrder, {"max_lookahead": 1}), (Windowed, {"over_sampling_ratio": 1.5})],
)
def test_a_policy_with_options_is_accepted(
    policy: Callable[..., Any], options: Mapping[str, Any]
) -> None:
    prove_sampler(policy, options, runs=60)


@pytest.mark.parametrize(
    ("policy", "error", "told"),
    [
        (NeverSelects, SamplerRefused, "step 1 is never full"),
        (AdmitsWithoutEnd, SamplerRefused, "its max_outstanding_groups is 9"),
        (HoldsWhatItAdmits, SamplerBroken, "admitted just now"),
        (SelectsWhatIsTooOld, SamplerBroken, "allowed: groups of version"),
        (DrawsForTheFirstStepOnly, SamplerRefused, "is never full"),
        (View, SamplerNotLoaded, "Protocols cannot be instantiated"),
    ],
)
def test_a_broken_policy_is_refused_with_the_reason(
    policy: Callable[..., Any], error: type[OffbeatError], told: str
) -> None:
    with pytest.raises(error, match=told):
        prove_sampler(policy, runs=60)
