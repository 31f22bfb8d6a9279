"""What a tutorial page may hold, and how the test of the pages reads and compares it."""

import re
from pathlib import Path
from typing import Final

import pytest

from tests.support.tutorials import Page, Reader, find_missing_lines, parse_blocks

ROOT: Final = Path(__file__).parents[2]
TUTORIALS: Final = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
FOLLOWED: Final = [*TUTORIALS, ROOT / "docs" / "your-agent.md"]
FEWEST_WORDS, MOST_WORDS = 250, 500

PAGE: Final = """\
Write `a.yaml`:

```yaml title="a.yaml"
steps: 300
```

<!-- test: steps=2 -->
```bash
offbeat train a.yaml  # a minute
```

```text
done
```

<!-- not run: needs a GPU -->
```bash
nvidia-smi
```

*Tested: 2 blocks. Not run: 1 (needs a GPU).*
"""


def count_words(page: str) -> int:
    """Count the words outside of code and comments."""
    return len(re.sub(r"```.*?```|<!--.*?-->", "", page, flags=re.DOTALL).split())


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_is_short(path: Path) -> None:
    assert FEWEST_WORDS <= count_words(path.read_text()) <= MOST_WORDS


@pytest.mark.parametrize("path", FOLLOWED, ids=lambda path: path.stem)
def test_a_tutorial_promises_something_and_says_what_a_test_runs(path: Path) -> None:
    text = path.read_text()
    assert text.split("\n\n")[1].startswith(("By the end of this page ", "This page is a list "))
    assert text.rstrip().splitlines()[-1] == Page.read(path).describe_test()


@pytest.mark.parametrize("path", FOLLOWED, ids=lambda path: path.stem)
def test_the_text_of_a_tutorial_names_each_file_that_it_shows(path: Path) -> None:
    prose = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    titles = {block.title for block in Page.read(path).blocks if block.title}
    assert {title for title in titles if f"`{title}`" not in prose} == set()


def test_a_page_is_read_as_files_commands_and_what_they_print(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    page = Page.read(path)
    recipe, train, gpu = page.blocks
    assert (recipe.title, recipe.read()) == ("a.yaml", "steps: 300\n")
    assert (train.read().split(), train.output) == (
        ["offbeat", "train", "a.yaml", "steps=2", "#", "a", "minute"],
        "done\n",
    )
    assert gpu.not_run == "needs a GPU"
    assert page.describe_test() == PAGE.splitlines()[-1]


@pytest.mark.parametrize(
    "page",
    ["```yaml\na: 1\n```\n", "```\nls\n```\n", "```text\ndone\n```\n"],
    ids=["a_file_without_a_name", "no_language", "output_of_nothing"],
)
def test_a_block_that_no_test_would_run_write_or_compare_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="line 1: "):
        parse_blocks(page)


def test_output_is_that_of_the_block_right_before_it() -> None:
    with pytest.raises(ValueError, match="line 7: output that follows no command"):
        parse_blocks("```bash\nls\n```\n\nIt prints\n\n```text\na\n```\n")


def test_a_value_of_the_test_replaces_the_one_of_the_block() -> None:
    (block,) = parse_blocks('<!-- test: steps=2 -->\n```python\ntrain(steps=300, x="")\n```\n')
    assert block.read() == 'train(steps=2, x="")\n'
    (block,) = parse_blocks("<!-- test: stepz=2 -->\n```python\ntrain(steps=300)\n```\n")
    with pytest.raises(ValueError, match="line 2: the block has no stepz"):
        block.read()


def test_output_is_compared_line_by_line_with_any_numbers() -> None:
    printed = "start\nreward  0.247 -> 0.835\nsteps   300 in 1 min 09 s\nstarter-1350b646  ended\n"
    assert find_missing_lines("reward 0.1 -> 0.2\nsteps 20 in 3.4 s\n", printed) == []
    assert find_missing_lines("start\n...\nstarter-00000000 ended\n", printed) == []
    assert find_missing_lines("start\nsteps 1 in 2 s\n", printed) == ["steps 1 in 2 s"]
    assert find_missing_lines("steps 1 in 2 s\n...\nstart\n", printed) == ["start"]
    assert find_missing_lines("reward many -> 0.8\n", printed) == ["reward many -> 0.8"]


def follow(tmp_path: Path, text: str) -> Path:
    """Follow a page in a folder; return the folder."""
    path, home, folder = tmp_path / "page.md", tmp_path / "home", tmp_path / "work"
    path.write_text(text)
    home.mkdir()
    folder.mkdir()
    Reader(home, folder).follow(Page.read(path))
    return folder


def test_a_reader_writes_files_changes_folders_and_keeps_python_open(tmp_path: Path) -> None:
    folder = follow(
        tmp_path,
        "```bash\nmkdir inner  # new\ncd inner\n```\n"
        '```python title="own.py"\nANSWER = 42\n```\n'
        "```python\nfrom own import ANSWER\n```\n"
        "```python\nprint(ANSWER, 'is the answer')\n```\n\n```text\n42 is the answer\n```\n",
    )
    assert (folder / "inner" / "own.py").read_text() == "ANSWER = 42\n"


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ("```bash\ntrue\nfalse\n```\n", "page.md:1: exit code 1 of false"),
        ("<!-- exit code: 2 -->\n```bash\n(exit 3)\n```\n", "exit code 3 of"),
        ("<!-- exit code: 2 -->\n```bash\ntrue\n```\n", "exit code 0 of true"),
        ("```python\n1 / 0\n```\n", "page.md:1: Python ended\n(?s:.*)ZeroDivisionError"),
        ("```bash\necho a\n```\n```text\nb\n```\n", "page.md:1: not printed:\nb"),
    ],
    ids=["a_command", "another_code", "no_refusal", "python", "output"],
)
def test_a_page_that_does_not_do_what_it_says_is_found(
    tmp_path: Path, block: str, reason: str
) -> None:
    with pytest.raises(AssertionError, match=reason):
        follow(tmp_path, block)


def test_a_command_that_refuses_something_has_its_exit_code_in_the_page(tmp_path: Path) -> None:
    follow(tmp_path, "<!-- exit code: 3 -->\n```bash\n(exit 3)\n```\n")


def test_a_block_that_is_not_run_is_not_run(tmp_path: Path) -> None:
    follow(tmp_path, "<!-- not run: needs a GPU -->\n```bash\nfalse\n```\n")
