"""Shares of several environments, recounted from the committed groups: I19."""

from collections import Counter
from functools import reduce
from math import gcd

from offbeat.config.run import RunConfig
from offbeat.messages.groups import Receipt
from offbeat.simulation.audit_findings import Findings


class Environments:
    """Environment of every committed prompt, and how many of a cycle each environment has."""

    def __init__(self, config: RunConfig, findings: Findings) -> None:
        weights = {name: each.weight for name, each in config.environments.items()} or {"": 1}
        divisor = reduce(gcd, weights.values())
        self._most = {name: weight // divisor for name, weight in weights.items()}
        self._cycle, self._findings = sum(self._most.values()), findings
        self._known = dict[int, str]()
        self._counts = Counter[tuple[int, str]]()  # prompts by cycle and environment

    def committed(self, receipt: Receipt) -> None:
        """Check the environment of a group that was committed."""
        index, name = receipt.prompt_index, receipt.environment
        if name not in self._most:
            self._findings.add("I19", f"group {index} is of environment {name!r}, which is none")
            return
        if index in self._known:  # committed before, by another attempt
            if self._known[index] != name:
                text = f"prompt {index} was of {self._known[index]!r}, and is of {name!r} now"
                self._findings.add("I19", text)
            return
        self._known[index] = name
        cycle = index // self._cycle
        self._counts[cycle, name] += 1
        if self._counts[cycle, name] > self._most[name]:
            self._findings.add(
                "I19",
                f"{self._counts[cycle, name]} of the {self._cycle} prompts from "
                f"{cycle * self._cycle} on are of {name!r}; its weight is {self._most[name]}",
            )
