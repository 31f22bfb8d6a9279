"""Brings a controller to a consistent state: at the start, after a crash, or for a rewind.

The journal records intents and results, and the trainer reports its version. So the trainer decides
whether an intended step was applied. The controller never guesses.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

import structlog

from offbeat.config.mixture import sampling_identity
from offbeat.controller.errors import OtherWeights, TrainerAhead
from offbeat.controller.events import TrainerReplaced
from offbeat.controller.failpoints import Failpoint
from offbeat.controller.group_moves import Place
from offbeat.controller.ports import Payloads
from offbeat.controller.rollouts import RolloutPump
from offbeat.controller.state import RunState
from offbeat.controller.syncing import WeightSync
from offbeat.controller.trainer_client import TrainerClient
from offbeat.messages.failures import Component, DeadlineExceeded, PayloadLost
from offbeat.messages.fences import StepKey
from offbeat.messages.fixed_times import READ_JOURNAL_S
from offbeat.messages.training import TrainerState

GROUPS_PER_TURN: Final = 4000
"""Groups returned between two turns of the event loop: some 20 ms of work."""
log = structlog.stdlib.get_logger()
_SEARCH_S: Final = 30.0  # a local lookup in this machine's object store


class Recovery:
    """Brings ledger, queue, fleet and trainer to one version."""

    def __init__(
        self,
        state: RunState,
        trainer_client: TrainerClient,
        sync: WeightSync,
        rollouts: RolloutPump,
        payloads: Payloads,
        *,
        groups_per_turn: int = GROUPS_PER_TURN,
    ) -> None:
        """Create the recovery of a controller.

        Args:
            state: State of the run.
            trainer_client: Client of the trainer.
            sync: The weight sync. A rewind invalidates its release.
            rollouts: The rollout pump, which dispatches returned groups again.
            payloads: Payloads that have survived their owner.
            groups_per_turn: Maximum groups returned between two turns of the event loop.
        """
        self._groups_per_turn = groups_per_turn
        self._state, self._trainer_client, self._sync = state, trainer_client, sync
        self._rollouts, self._payloads = rollouts, payloads
        self._sampling = sampling_identity(state.config)
        self._read_again = set[tuple[int, int]]()
        """Prompt index and attempt of ready groups whose columns were lost once and read again."""

    async def start(self) -> None:
        """Start a run: from nothing, or from the journal of former controllers.

        Raises:
            TrainerAhead: The trainer has applied a step that the journal does not contain.
            TrainerLost: The trainer was lost meanwhile. The caller must call ``rewind``.
        """
        state, ledger = self._state, self._state.ledger
        found = ledger.counts()
        self._return(ledger.groups_at(Place.IN_FLIGHT), "controller_lost")
        self._readmit(self._take_payloads(), "payload_lost")
        await self._again(ledger.groups_at(Place.ADMITTED))
        answer = await self._trainer_client.first_answer()
        if state.fence.incarnation > 1 or answer.version:
            await self._sort_out_step(answer)
            if answer.version < ledger.trainer_version:
                anew = "the trainer was started anew"
                if answer.version != ledger.rewinding_to:  # else counted when the rewind began
                    state.ledger.note(TrainerReplaced(reason=anew, found=True))
                await self.rewind(anew, taking_over=True)
            self._readmit(self._take_payloads(), "payload_lost")
            log.info("run.recovered", found=found, now=ledger.counts())
        # A former controller may have died between a version and its consequences. The recipe of a
        # resumed run may also allow less staleness than when its groups were made.
        self._rollouts.make_room()
        self._rollouts.sweep(predictive=False)
        state.observer.reached(Failpoint.RECOVERED)

    async def rewind(self, reason: str, *, taking_over: bool = False) -> None:
        """Restore the trainer, and return everything else to the restored version.

        If the restored checkpoint has the current version, nothing is lost and no rewind is
        recorded.

        Raises:
            OtherWeights: The restored checkpoint is intact, but was not written by this run.
        """
        state, ledger = self._state, self._state.ledger
        self._sync.forget()
        self._rollouts.cancel_all("rewound")
        restored = await self._trainer_client.restore(ledger.trainer_version)
        known = ledger.checkpoint_digests.get(restored.version)
        if known not in (None, restored.digest):
            raise OtherWeights(restored.version, restored.digest, str(known))
        before = ledger.trainer_version
        whole = taking_over and known is not None and not ledger.training
        is_cut_short = ledger.rewinding_to is not None  # by the death of a former controller
        undone = restored.version < before or not whole or is_cut_short
        state.fleet.rewound(restored.version)
        groups = await self._undo(restored.version, reason) if undone else 0
        self._readmit(self._take_payloads(), "payload_lost")
        self._rollouts.make_room()
        self._rollouts.sweep(predictive=False)
        if undone:
            log.warning(
                "run.rewound",
                version=restored.version,
                lost_steps=before - restored.version,
                groups=groups,
                reason=reason,
            )
        else:
            log.info("trainer.restored", version=restored.version, reason=reason)
        state.observer.reached(Failpoint.REWOUND)

    async def _undo(self, to_version: int, reason: str) -> int:
        """Undo the steps after ``to_version``. Return the number of groups to roll out again.

        Other tasks run in between. No engine serves and no step is open, so nothing is dispatched
        or trained.
        """
        after = await self._state.waits.call(
            f"rewind to version {to_version}",
            target="the journal, for the steps since",
            deadline_s=READ_JOURNAL_S,
            component=Component.JOURNAL,
            reply=self._state.journal.steps_after(to_version),
        )
        parts = self._state.ledger.rewind_in_parts(
            to_version, reason, after, groups_per_part=self._groups_per_turn
        )
        groups = 0
        for prompt_indices in parts:
            groups += len(prompt_indices)
            self._state.queue.clear(prompt_indices)
            await self._again(prompt_indices)
            if self._state.ledger.rewinding_to is not None:
                self._state.observer.reached(Failpoint.UNDOING)
        return groups

    async def _again(self, prompt_indices: Sequence[int]) -> None:
        """Dispatch these groups again, part by part, so that other tasks run in between."""
        for begin in range(0, len(prompt_indices), self._groups_per_turn):
            for prompt_index in prompt_indices[begin : begin + self._groups_per_turn]:
                self._rollouts.again(prompt_index)
            await asyncio.sleep(0)

    async def payloads_lost(self, failure: PayloadLost) -> None:
        """Replace columns of ready groups that were lost with a machine. No step may be open.

        A loss rarely affects a single payload, so all payloads are checked. Lost columns are read
        again from a stored copy. If they are lost a second time, the group is rolled out again.
        """
        state, ledger = self._state, self._state.ledger
        lost = set(failure.prompt_indices) | await self._also_lost()
        replaced = {(each, ledger.ready[each].attempt) for each in lost & ledger.ready.keys()}
        again = sorted(prompt_index for prompt_index, _ in replaced & self._read_again)
        state.queue.clear(prompt_index for prompt_index, _ in replaced)
        self._rollouts.lost(again, failure)
        unreadable = self._take_payloads()
        self._rollouts.lost(unreadable, failure)
        if again or unreadable:
            self._rollouts.make_room()
        self._read_again = {
            (prompt_index, group.attempt)
            for prompt_index, group in ledger.ready.items()
            if (prompt_index, group.attempt) in replaced | self._read_again
        }
        log.warning(
            "payloads.lost",
            lost=len(replaced),
            read_again=len(replaced) - len(again) - len(unreadable),
            rolled_out_again=len(again) + len(unreadable),
            error=str(failure),
        )

    async def _also_lost(self) -> set[int]:
        """Return ready groups with columns that are known to be lost."""
        state = self._state
        payloads = {
            prompt_index: state.queue.payloads(prompt_index)
            for prompt_index in state.ledger.ready
            if prompt_index in state.queue
        }
        try:
            return await state.waits.call(
                "search for lost payloads",
                target="the object store",
                component=Component.OBJECT_STORE,
                deadline_s=_SEARCH_S,
                reply=self._payloads.lost(payloads),
            )
        except DeadlineExceeded as late:  # training finds the lost columns
            log.warning("payloads.not_searched", error=str(late))
            return set()

    # --- after a former controller ---------------------------------------------------------------

    async def _sort_out_step(self, answer: TrainerState) -> None:
        """Record the step that a former controller left open as applied, or undo it."""
        state, ledger = self._state, self._state.ledger
        intent = ledger.intent
        if answer.version > ledger.trainer_version:
            reported = (answer.last_step, answer.last_attempt)
            if (
                answer.version != ledger.trainer_version + 1
                or intent is None
                or reported != (intent.step, intent.attempt)
            ):
                raise TrainerAhead(
                    f"version {answer.version} (step {reported[0]}, attempt {reported[1]})",
                    f"version {ledger.trainer_version}, intending {intent}",
                )
            ledger.applied(intent.step, intent.attempt)
        # Also in this case: an earlier controller may have adopted this step, begun the next one
        # and died before its journal recorded that.
        key = StepKey(state.step, state.first_of_incarnation, 0)
        await self._trainer_client.abort(key, state.config.trainer.step_deadline_s)
        if ledger.training or ledger.intent:
            ledger.unclaim(key.step, key.attempt)

    def _take_payloads(self) -> list[int]:
        """Reference the payloads of ready groups. Return the groups without a payload.

        Groups that were sampled with different settings are rolled out again, because the recipe of
        a resumed run may have changed.
        """
        state, ledger = self._state, self._state.ledger
        lost, other = list[int](), list[int]()
        for group in ledger.ready.values():
            receipt = group.receipt
            if receipt is None or group.prompt_index in state.queue:
                continue
            if receipt.sampling != self._sampling:
                other.append(group.prompt_index)
                continue
            payload = self._payloads.readable(receipt)
            if payload is None:
                lost.append(group.prompt_index)
            else:
                state.queue.put(
                    group.prompt_index,
                    group.attempt,
                    receipt.columns,
                    receipt.payload_bytes,
                    payload,
                )
        self._readmit(other, "other_sampling")
        if other:
            log.warning("run.other_sampling", groups=len(other), now=self._sampling)
        return lost

    def _readmit(self, prompt_indices: Iterable[int], reason: str) -> None:
        for prompt_index in prompt_indices:
            self._state.ledger.recover(prompt_index, reason)
            self._rollouts.again(prompt_index)

    def _return(self, prompt_indices: Iterable[int], reason: str) -> None:
        for prompt_index in prompt_indices:
            self._state.ledger.recover(prompt_index, reason)
