"""Writes ``docs/python-api.md`` and ``docs/plugin-protocols.md``: ``python -m tools.api_pages``.

The pages have the signatures and docstrings of all public names. They are read from the sources, so
nothing of the package is imported.
"""

import ast
import re
import textwrap
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
COMMAND: Final = "python -m tools.api_pages"
FACADES: Final = ("offbeat.interfaces", "offbeat", "offbeat.testing")
"""Modules of the public names. A page names the first one that has a name."""

NOT_EXPORTED: Final = {
    "Agent": "offbeat.environments.environment_plugin",
    "EnvironmentPlugin": "offbeat.environments.environment_plugin",
    "LiveRun": "offbeat.launch.run",
    "Paced": "offbeat.sampler.pacing",
    "Preview": "offbeat.launch.preview",
}
"""Classes that public functions return, or that public classes derive from."""

_COLUMNS: Final = 120
_CODE_COLUMNS: Final = 100
_OVERRIDDEN: Final = ("_load_release",)
"""Methods that a plug-in overrides although their names begin with an underscore."""

_KEYS: Final = ("EnvironmentConfig", "RunConfig")
"""Models whose fields are on the page of the configuration."""

_SECTION: Final = re.compile(r"^(Args|Raises|Returns|Yields):$")

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Page(NamedTuple):
    """A page: its head, and the names of each chapter."""

    file: str
    head: str
    chapters: Mapping[str, Sequence[str]]


PYTHON: Final = Page(
    "docs/python-api.md",
    f"""\
# Python API

Generated from signatures and docstrings by `{COMMAND}`; do not edit.

Import these names from `offbeat`. [Python](python.md) shows how to use them. Environments, agents and samplers are on
the page of [plug-in protocols](plugin-protocols.md), errors that end a run on the page of [errors](errors.md).
""",
    {
        "Runs": ("train", "start", "resume", "preview", "open_run", "Run", "LiveRun", "Preview"),
        "Recipes and records": ("load_recipe", "run_recipe", "read_events"),
        "Errors of a run": ("OffbeatError", "RunRefused", "TrainingFailed", "RunInterrupted"),
    },
)
PROTOCOLS: Final = Page(
    "docs/plugin-protocols.md",
    f"""\
# Plug-in protocols

Generated from signatures and docstrings by `{COMMAND}`; do not edit.

Import these names from `offbeat.interfaces`, and proofs from `offbeat.testing`. [Plug-ins](doors.md) shows how to use
them. A method that is neither `@abstractmethod` nor of a `Protocol` is optional.
""",
    {
        "Environments and agents": (
            "Environment",
            "SingleTurn",
            "MultiTurn",
            "Episode",
            "Response",
            "EncodedPrompt",
            "NamedRewards",
            "EnvironmentUnavailable",
            "Prompt",
            "PromptSource",
            "RolloutTask",
            "EnvironmentPlugin",
            "PluginOfEnvironments",
            "PluginOfAgents",
            "Agent",
            "AgentClient",
            "EnvironmentTraits",
            "EnvironmentConfig",
            "RunConfig",
            "Tokenizer",
            "content_ids",
            "encode_prompt",
        ),
        "Engines": (
            "EnginePlugin",
            "PluginGeneratorConfig",
            "EngineSpec",
            "SteppedEngine",
            "EngineLoop",
            "EngineServer",
            "ModuleEngineServer",
            "LoadOutcome",
            "IncomingRelease",
            "WeightRelease",
            "CanaryAnswer",
            "GenerateRequest",
            "GenerateResult",
            "SamplingParams",
            "end_ids_of",
            "new_incarnation",
            "EngineUnavailable",
            "InvalidRequest",
        ),
        "Samplers": (
            "Sampler",
            "Admission",
            "OutstandingGroup",
            "View",
            "InOrder",
            "Paced",
            "ReadyFirst",
            "WeightFifo",
            "Windowed",
            "past_bound",
            "past_bound_in_flight",
        ),
        "Trackers": (
            "Tracker",
            "Sink",
            "TrackedRun",
            "MetricRecord",
            "ExportPlace",
            "SinkUnusable",
        ),
        "Sections, findings and errors": (
            "Config",
            "Clash",
            "Finding",
            "error",
            "warning",
            "ok",
            "FixableError",
            "PluginUnusable",
        ),
        "Proofs": (
            "prove_loss",
            "prove_advantage",
            "prove_sampler",
            "prove_environment",
            "prove_engine",
            "prove_tracker",
            "EngineRefused",
            "EnvironmentRefused",
            "SamplerRefused",
            "TrackerRefused",
        ),
    },
)
PAGES: Final = (PYTHON, PROTOCOLS)


def compose_page(page: Page) -> str:
    """Return the text of a page."""
    main = FACADES[1] if page is PYTHON else FACADES[0]
    chapters = (
        f"\n## {title}\n" + "".join(_compose_entry(name, main) for name in names)
        for title, names in page.chapters.items()
    )
    return page.head + "".join(chapters)


@cache
def public_modules(facade: str) -> dict[str, str]:
    """Return the defining module of each name that a module exports."""
    tree = _parse(facade)[0]
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_MODULES":
            return dict(ast.literal_eval(node.value)) if node.value else {}
    return {
        alias.name: node.module or ""
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _compose_entry(name: str, main: str) -> str:
    """Return the section of one name."""
    homes = [facade for facade in FACADES if name in public_modules(facade)]
    module = public_modules(homes[0])[name] if homes else NOT_EXPORTED[name]
    tree, lines = _parse(module)
    (node,) = (
        each
        for each in tree.body
        if isinstance(each, ast.ClassDef | Function) and each.name == name
    )
    parts = [f"\n### `{name}`\n"]
    if not homes:
        parts.append(_paragraph(f"Defined in `{module}`."))
    elif main not in homes and homes[0] != "offbeat.testing":
        parts.append(_paragraph(f"Import it from `{homes[0]}`."))
    if isinstance(node, ast.ClassDef):
        parts += _compose_class(node, lines)
    else:
        parts += [_fence(_signature(node)), *_compose_docstring(node)]
    return "\n".join(parts)


def _compose_class(node: ast.ClassDef, lines: Sequence[str]) -> Iterator[str]:
    fields = [] if node.name in _KEYS else list(_fields(node, lines))
    bases = [ast.unparse(each) for each in (*node.bases, *node.keywords)]
    head = f"class {node.name}({', '.join(bases)})" if bases else f"class {node.name}"
    body = list[str]()
    inits = () if node.name in NOT_EXPORTED else _methods(node)
    init = next((each for each in inits if each.name == "__init__"), None)
    if init is not None:
        body += textwrap.indent(_signature(init), "    ").splitlines()
    described = list[Function]()
    for method in () if node.name in _KEYS else _methods(node):
        if method.name != "__init__" and ast.get_docstring(method):
            described.append(method)
        elif method.name != "__init__":
            body += textwrap.indent(_signature(method), "    ").splitlines()
    shown = [f"    {field.code}" for field in fields]
    shown += ["", *body] if shown and body else body
    yield _fence("\n".join([f"{head}:", *shown]) if shown else f"{head}: ...")
    yield from _compose_docstring(node)
    if node.name in _KEYS:
        yield _paragraph("Its fields are the keys of the [configuration](configuration.md).")
    explained = [f"- `{field.name}`: {field.doc}" for field in fields if field.doc]
    if explained:
        yield "".join(_paragraph(each, indent="  ") for each in explained)
    if init is not None:
        yield from _sections(_split(init)[1])
    for method in described:
        yield f"#### `{node.name}.{method.name}`\n"
        yield _fence(_signature(method))
        yield from _compose_docstring(method)


# --- what the sources say ------------------------------------------------------------------------


class _Field(NamedTuple):
    """Field of a class: its name, its line of code, and its explanation."""

    name: str
    code: str
    doc: str


@cache
def _parse(module: str) -> tuple[ast.Module, list[str]]:
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = path.read_text(encoding="utf-8")
    return ast.parse(text), text.splitlines()


def _methods(node: ast.ClassDef) -> Iterator[Function]:
    """Yield the constructor, the public methods, and those that a plug-in overrides."""
    for each in node.body:
        if isinstance(each, Function) and (
            not each.name.startswith("_") or each.name in ("__init__", *_OVERRIDDEN)
        ):
            yield each


def _fields(node: ast.ClassDef, lines: Sequence[str]) -> Iterator[_Field]:
    """Yield annotated fields, with the docstring or the comment that explains each."""
    for each, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            name = each.target.id
            if name.startswith("_"):
                continue
            default = "" if each.value is None else f" = {_default(each.value)}"
            code = f"{name}: {_type(each.annotation)}{default}"
            yield _Field(name, code, _explain_field(each, after, lines))


def _explain_field(node: ast.AnnAssign, after: ast.stmt | None, lines: Sequence[str]) -> str:
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
        text = str(after.value.value)
    else:
        last = node.end_lineno or node.lineno
        trailing = re.search(r"#(?! noqa)(.*)", lines[last - 1][node.end_col_offset or 0 :])
        before = list[str]()
        for line in reversed(lines[: node.lineno - 1]):
            if not line.lstrip().startswith("# "):
                break
            before.insert(0, line.strip(" #"))
        text = trailing.group(1) if trailing else " ".join(before)
    return _plain(" ".join(text.split()))


def _type(node: ast.expr) -> str:
    """Return an annotation without the rules of ``Annotated`` and the quotes of names."""

    class Plain(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            self.generic_visit(node)
            if ast.unparse(node.value) == "Annotated" and isinstance(node.slice, ast.Tuple):
                return node.slice.elts[0]
            return node

        def visit_Constant(self, node: ast.Constant) -> ast.AST:
            return ast.Name(node.value) if isinstance(node.value, str) else node

    if ast.unparse(node).startswith("Literal"):
        return ast.unparse(node)
    return ast.unparse(Plain().visit(ast.parse(ast.unparse(node), mode="eval").body))


def _default(node: ast.expr) -> str:
    return "..." if isinstance(node, ast.Call) else ast.unparse(node)


def _signature(node: Function) -> str:
    """Return the definition of a function without its body."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    missing = [None] * (len(positional) - len(given.defaults))
    shown = [
        _parameter(arg, default)
        for arg, default in zip(positional, [*missing, *given.defaults], strict=True)
    ]
    if given.vararg:
        shown.append("*" + _parameter(given.vararg, None))
    elif given.kwonlyargs:
        shown.append("*")
    shown += map(_parameter, given.kwonlyargs, given.kw_defaults)
    if given.kwarg:
        shown.append("**" + _parameter(given.kwarg, None))
    marks = [f"@{mark}\n" for mark in map(_mark, node.decorator_list) if mark]
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returned = f" -> {_type(node.returns)}" if node.returns else ""
    head, end = f"{kind} {node.name}(", f"){returned}: ..."
    line = head + ", ".join(shown) + end
    if len(line) > _CODE_COLUMNS:
        line = head + "".join(f"\n    {each}," for each in shown) + f"\n{end}"
    return "".join(marks) + line


def _mark(decorator: ast.expr) -> str:
    name = ast.unparse(decorator).rpartition(".")[2]
    return name if name in ("abstractmethod", "property", "classmethod", "staticmethod") else ""


def _parameter(arg: ast.arg, default: ast.expr | None) -> str:
    name = f"{arg.arg}: {_type(arg.annotation)}" if arg.annotation else arg.arg
    if default is None:
        return name
    return (
        f"{name} = {ast.unparse(default)}" if arg.annotation else f"{name}={ast.unparse(default)}"
    )


# --- how it is written ---------------------------------------------------------------------------


def _split(node: ast.ClassDef | Function) -> tuple[list[str], dict[str, list[str]]]:
    """Return the lines of a docstring, and the lines of each of its sections."""
    prose, sections = list[str](), dict[str, list[str]]()
    lines = prose
    for line in (ast.get_docstring(node) or "").splitlines():
        if found := _SECTION.match(line):
            lines = sections.setdefault(found.group(1), [])
        else:
            lines.append(line)
    return prose, sections


def _compose_docstring(node: ast.ClassDef | Function) -> Iterator[str]:
    prose, sections = _split(node)
    for paragraph in re.split(r"\n\s*\n", "\n".join(prose).strip()):
        if paragraph.startswith("    "):
            yield _fence(textwrap.dedent(paragraph), "text")
        elif paragraph:
            yield _paragraph(_plain(" ".join(paragraph.split())))
    yield from _sections(sections)


def _sections(sections: Mapping[str, Sequence[str]]) -> Iterator[str]:
    titles = {"Args": "Arguments:", "Raises": "Errors:", "Returns": "Returns:", "Yields": "Yields:"}
    for name, lines in sections.items():
        items = list[str]()
        for line in textwrap.dedent("\n".join(lines)).strip().splitlines():
            if line.startswith(" ") and items:
                items[-1] += f" {line.strip()}"
            elif line.strip():
                items.append(line.strip())
        yield f"{titles[name]}\n"
        yield "".join(_paragraph(_item(each), indent="  ") for each in items)


def _item(text: str) -> str:
    names, colon, doc = text.partition(":")
    if not colon or not re.fullmatch(r"[\w*., ]+", names):
        return f"- {_plain(text)}"
    marked = ", ".join(f"`{name.strip()}`" for name in names.split(","))
    return f"- {marked}: {_plain(doc.strip())}"


def _plain(text: str) -> str:
    return text.replace("``", "`")


def _fence(code: str, language: str = "python") -> str:
    if language == "python":
        code = re.sub(r"'([^'\"]*)'", r'"\1"', code)
    return f"```{language}\n{code}\n```\n"


def _paragraph(text: str, indent: str = "") -> str:
    wrap = textwrap.TextWrapper(
        width=_COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return wrap.fill(text) + "\n"


def main() -> None:
    """Write the pages; refuse arguments."""
    ArgumentParser(description=__doc__).parse_args()
    for page in PAGES:
        (ROOT / page.file).write_text(compose_page(page), encoding="utf-8")


if __name__ == "__main__":
    main()
