"""A staleness policy."""

from dataclasses import dataclass

from offbeat.interfaces import View, Windowed, past_bound_in_flight


@dataclass(frozen=True, slots=True)
class PromptOrder(Windowed):
    """Train ready groups in the order in which their prompts were drawn."""

    def select(self, view: View) -> list[int]:
        """Return the first ready groups that are within the bound."""
        oldest = view.trainer_version - self.max_staleness
        fit = sorted(n for n, group in view.ready.items() if group.oldest_version >= oldest)
        return fit[: max(0, view.groups_needed)]

    def in_flight_to_cancel(self, view: View, *, predictive: bool) -> list[int]:
        """Return groups in flight that are past the bound."""
        return past_bound_in_flight(view, self.max_staleness)
