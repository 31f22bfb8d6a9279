"""The table of docs/parity.md: what a run of the suites has measured, and nothing else."""

from collections.abc import Iterator
from pathlib import Path

from parity_cases import PAGE_CASES, Case

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
HEAD = """# Parity of the trainers

The split train step gives the gradient of the single-shot step, however a batch is cut into chunks, laid out in rows
and assigned to ranks. Below is the largest relative error of any tensor of the gradient: the largest difference to the
reference, over the largest value of that tensor. The reference is the `torch` trainer on one rank with the whole batch
in one chunk, which is itself held against plain autograd, one sequence after another
(`tests/unit/trainers/test_split_step.py`). Everything is computed in float64; the tests allow 1e-10. transformers
rounds norms and the scores of routers to float32, whatever it is given: there its own code is run with float64.

dp: data-parallel ranks, tp: tensor-parallel ones, pp: pipeline stages, cp: ranks that share each row, ep: ranks that
divide the experts (*of* those that they are counted among), etp: ranks that share the matrices of an expert;
*sequence*: tensor-parallel ranks share the tokens, too; *overlap*: reductions start while backward passes run. Ranks
are processes over gloo.

Models are tiny and random. Rows that name none are of Qwen 3; *experts*: Qwen 3 MoE; *shared experts*: Qwen 2 MoE;
*sigmoid router*: GLM-4 MoE; *best groups*: dots.llm1, whose router chooses among groups of experts; *linear*, *llama3*,
*yarn*: scaled rotary positions; *tied* and *biases* of the torch trainer: Llama; *adapters*: LoRA on Qwen 3, in a
second step, beside one rank with one chunk and adapters.

Written by `python -m pytest tests/parity -m long --write-parity`, in one run over one world of ranks for all backends;
a row that was not run stays as it was.

"""
BACKENDS = ("torch", "megatron")
NAMES = ("backend", "layout", "rows", "loss")


class ParityTable:
    """Collects measurements while tests run."""

    def __init__(self) -> None:
        self._errors = dict[Case, dict[int, str]]()
        self._worst = dict[tuple[Case, int], float]()

    def add(
        self, backend: str, layout: str, loss: str, chunks: int, error: float, rows: str = "packed"
    ) -> None:
        """One measurement of a case of the page; of several of the same, the largest error counts."""
        case = backend, layout, rows, loss
        assert case in PAGE_CASES, f"{case} is no row of the page"
        worst = self._worst[case, chunks] = max(error, self._worst.get((case, chunks), 0.0))
        self._errors.setdefault(case, {})[chunks] = f"{worst:.1e}"

    def write(self, page: Path = PAGE) -> None:
        """Put what was measured into the page."""
        errors = {case: each for case, each in read(page).items() if case in PAGE_CASES}
        errors |= self._errors
        chunks = sorted({count for each in errors.values() for count in each})
        heads = (*NAMES, *(f"{count} chunk{'s' * (count > 1)}" for count in chunks))
        lines = [heads, ("---",) * len(heads)]
        cases = sorted(errors, key=lambda case: (BACKENDS.index(case[0]), *case))
        lines += [(*case, *(errors[case].get(n, "") for n in chunks)) for case in cases]
        page.write_text(HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines))


def read(page: Path) -> dict[Case, dict[int, str]]:
    """The table of a page that was written before."""
    lines = list(_cells(page))
    chunks = [int(head.split()[0]) for head in lines[0][len(NAMES) :]] if lines else []
    table = dict[Case, dict[int, str]]()
    for line in lines[2:]:
        backend, layout, rows, loss, *errors = line
        filled = zip(chunks, errors, strict=True)
        table[backend, layout, rows, loss] = {count: each for count, each in filled if each}
    return table


def _cells(page: Path) -> Iterator[tuple[str, ...]]:
    for line in page.read_text().splitlines() if page.exists() else ():
        if line.startswith("| "):
            yield tuple(cell.strip() for cell in line.removesuffix("|")[1:].split("|"))
