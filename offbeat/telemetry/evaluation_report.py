"""Table of an evaluation by itself."""

from collections.abc import Iterator, Mapping

from rich.table import Table

from offbeat.algorithms.eval_scores import Estimate, SetScores


def render_scores(scores: Mapping[str, SetScores]) -> Table:
    """Render one row per score of each set, with its standard error."""
    table = Table(box=None, pad_edge=False)
    for column in ("set", "score", "value", "std. error", "prompts", "samples"):
        table.add_column(column, justify="left" if column in ("set", "score") else "right")
    for name, each in scores.items():
        masked = f" ({each.masked_samples} masked)" if each.masked_samples else ""
        size = [str(each.prompts), f"{each.samples}{masked}"]
        for number, (score, estimate) in enumerate(_scores_of(each)):
            error = "" if estimate.error is None else f"{estimate.error:.3f}"
            first = [name, score, f"{estimate.value:.3f}", error]
            table.add_row(*first, *(["", ""] if number else size))
    return table


def _scores_of(scores: SetScores) -> Iterator[tuple[str, Estimate]]:
    yield f"mean@{scores.k}", scores.mean
    yield from ((f"pass@{k}", passed) for k, passed in scores.pass_at.items())
    if scores.majority is not None:
        yield f"maj@{scores.k}", scores.majority
