"""Audit of evaluations: each is complete, and sampled under one weight version."""

from collections import Counter

from offbeat.config.mixture import evaluation_sets
from offbeat.config.run import RunConfig
from offbeat.plugins.simulation.audit_world import AuditTable, Findings, list_versions
from offbeat.plugins.simulation.records import Evaluated, Fault, Scored


class EvaluationAudit(AuditTable):
    """Compares the controller's records of evaluations with the samples of workers."""

    def __init__(self, config: RunConfig, findings: Findings) -> None:
        super().__init__(findings)
        self._config = config
        self._faulted = False
        self._recorded = set[int]()  # versions at which recorded evaluations were due
        self._wanted = {
            (name, place): each.samples
            for name, each in evaluation_sets(config).items()
            for place in range(each.prompts or 0)
        }
        # Versions under which a prompt of a set was sampled, by set and prompt index
        self._versions: dict[tuple[str, int], set[int]] = {}

    def on_fault(self, record: Fault) -> None:
        del record
        self._faulted = True

    def on_scored(self, record: Scored) -> None:
        """Check that an engine pinned for an evaluation loaded no other weights, faults aside."""
        versions = set(list_versions(record.spans))
        if len(versions) > 1 and not self._faulted:
            self._add(
                "I6", f"prompt {record.prompt_index} was scored under versions {sorted(versions)}"
            )
        if len(versions) == 1:
            place = record.eval_set, record.prompt_index
            self._versions.setdefault(place, set()).update(versions)

    def on_evaluated(self, record: Evaluated) -> None:
        """Check that an evaluation has complete sets, all sampled under its version."""
        self._recorded.add(record.due)
        what, samples = f"the evaluation due at version {record.due}", Counter(record.samples)
        if samples != self._wanted:
            of = f"samples {dict(samples)}, and its sets are {self._wanted}"
            self._add("I6", f"{what} has {of}")
        for place in samples:
            under = self._versions.get(place, set())
            if record.version not in under:
                of = f"version {record.version}, and {place} was sampled under {sorted(under)}"
                self._add("I6", f"{what} says {of}")
        if record.version < record.due:
            self._add("I6", f"{what} is of an older one: {record.version}")

    def finished(self, version: int, failed: int) -> None:
        """Check that a finished run has its last due evaluation, or its controller gave one up.

        Args:
            version: The last version.
            failed: Number of evaluations that the last controller gave up.
        """
        interval = self._config.eval.interval
        due = version - version % interval if interval else 0
        if self._wanted and due and due not in self._recorded and not failed:
            self._add("I6", f"version {due} was never scored; the run ended at {version}")
