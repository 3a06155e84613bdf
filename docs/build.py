"""Writes what the documentation takes from the code: the tables of algorithms.md, of options.md and
of datasets.md, the latter with the results of smoke.py, the algorithms of api.md, the tables of
robustness.md from the numbers of its bench, those of convex.md likewise, those of reliability.md
from the numbers of the campaign, and those of results/README.md; with `--figures` also the
pictures. The pages of single algorithms are made here too, but not written: site.py puts them into
the site, so that no copy of the code lies in the repository.

python docs/build.py [--figures]
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from html import escape
from inspect import getdoc, getmodule
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any
from unittest.mock import patch

from fedsso.algorithm.records import fields_of
from fedsso.algorithms import ALGORITHMS, cautious, client_step, trust_region
from fedsso.data import PARTITIONS, TABLES, all_options, datasets, load
from fedsso.engine.settings import options
from fedsso.errors import MOST
from fedsso.experiment.costs import Cost, Row, costs
from fedsso.objective.backend import Backend
from fedsso.report.federation_picture import picture

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))  # benchmarks and campaign are not installed
RESULTS = DOCS.parent / "results"
END = "<!-- end -->\n"
HEAD = (
    "name",
    "what it does",
    "exchanges",
    "down",
    "up",
    "extra bytes",
    "client keeps",
    "some clients absent",
    "second derivatives",
    "paper",
)
SCALARS = 2  # so many numbers beside FedAvg's are not called extra bytes
SECOND = ("hvp", "hessian", "rows")  # what an objective is asked for second derivatives
SETS = ("name", "what it is", "rows", "classes", "default partition, clients", "licence")
FIELDS = ("field", "option", "default", "meaning")
CITED = re.compile(
    r"(?P<code>\S.*?)  # (?P<where>(?:Alg\. \d+, )?lines? [\d-]+)(?:; (?P<note>.*))?$"
)
SPECIAL = re.compile(r"(?P<code>`[^`]+`)|(?P<mark>[\\`*_\[\]>|])|(?P<angle><)")
SMOKE = ("data set", "model", "d", "FedAvg", "its α", "FedSSO", "its α")
BESIDE = {
    "fedsso": {
        'The guard: guard="adaptive"': trust_region,
        'The guard: guard="cautious"': cautious,
        'The client step: alpha="auto"': client_step,
    },
}
"""Files beside an algorithm's own that its page shows as well, by their headings on the page."""


def algorithms() -> str:
    """One row for each algorithm of the registry; counts in numbers for a model of d parameters.

    Filter.js of the site finds its columns by their headings.
    """
    rows = []
    for row in cost_rows().values():
        cls = ALGORITHMS[row.algorithm]
        title = (getdoc(cls) or "").partition("\n")[0].rstrip(".")
        absent = f"no: use {cls.needs_all}" if cls.needs_all else "yes"
        assert row.theory is not None, f"no counts of {row.algorithm} in costs.THEORY"
        exchanges, down, up = row.theory[:3]
        counts = (str(exchanges), str(down), str(up), yes(extra_bytes(row.theory)))
        second = yes(row.algorithm in second_derivatives())
        facts = (*counts, str(row.theory.client), absent, second)
        rows.append((f"`{row.algorithm}`", title, *facts, paper(cls)))
    return markdown(HEAD, rows)


def yes(fact: bool) -> str:
    return "yes" if fact else "no"


def extra_bytes(theory: Cost) -> bool:
    """Whether more travels than FedAvg's d numbers each way, and a scalar or two."""
    down, up = theory.down, theory.up
    matrices = down.dd + up.dd
    vectors = down.d + up.d - 2
    numbers = down.one + up.one
    return bool(matrices > 0 or vectors > 0 or numbers > SCALARS)


@cache
def second_derivatives() -> frozenset[str]:
    """The algorithms that ask for second derivatives in a round, at their defaults.

    Each runs two rounds on shapes alone, as for its costs, with an objective that takes notes.
    """
    found = set()
    for name in ALGORITHMS:
        asked: list[str] = []
        with ExitStack() as patches:
            for method in SECOND:
                patches.enter_context(noting(method, asked))
            costs("mlp" if name == "fedper" else "mclr", [name])
        if asked:
            found.add(name)
    return frozenset(found)


@contextmanager
def noting(method: str, asked: list[str]) -> Iterator[None]:
    """Let objectives note that a method of theirs was called."""
    plain_method = getattr(Backend, method)

    def noted(self: Backend, *args: Any) -> Any:
        asked.append(method)
        return plain_method(self, *args)

    with patch.object(Backend, method, noted):
        yield


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def sets() -> str:
    """One row for each data set of the catalogue, of all its forms the first."""
    rows = []
    for d in datasets():
        count = d.forms[0].rows if d.forms else 0
        clients = len(TABLES.get(d.partition, ())) or (
            "all" if d.partition == "group" else d.clients
        )
        how = f"{d.partition}, {clients}" if d.partition else f"its own, {d.clients}"
        rows.append(
            (f"`{d.name}`", d.title, number(count), number(d.classes), how, d.licence or "–")
        )
    return markdown(SETS, rows)


def number(count: int) -> str:
    return f"{count:,}".replace(",", " ") if count else "–"


def smoke() -> str:
    """The results of smoke.py: mean accuracy and its range, or the training loss where targets are
    real."""
    found = json.loads((DOCS / "smoke.json").read_text())
    rows = []
    for d in (d for d in datasets() if not d.yours):
        lines = {
            model: found[f"{d.name} {model}"] for model in d.models if f"{d.name} {model}" in found
        }
        if not lines:
            rows.append((f"`{d.name}`", "", "", "not measured: no files", "", "", ""))
        for model, line in lines.items():
            cells = [
                cell
                for name in ("FedAvg", "FedSSO")
                for cell in (ending(line[name]), alpha(line[name]))
            ]
            rows.append((f"`{d.name}`", f"`{model}`", number(line["d"]), *cells))
    return markdown(SMOKE, rows)


def ending(result: dict[str, Any]) -> str:
    """Mean over the seeds, with the least and the largest."""
    values = result["accuracy"]
    if None in values:
        return f"loss {result['train_loss']:.4f}"
    return f"{sum(values) / len(values):.3f} ({min(values):.3f}–{max(values):.3f})"


def alpha(result: dict[str, Any]) -> str:
    return str(result["setting"].partition("alpha=")[2].partition(" ")[0])


def paper(cls: type) -> str:
    """The citation at the head of the algorithm's file; one that holds two papers begins a line
    with each."""
    head = (getdoc(getmodule(cls)) or "").partition("\n\n")[0]
    cited = [entry.partition(". ")[::2] for entry in re.split(r"\n(?=Fed\w+\. )", head)]
    own = next((text for names, text in cited if cls.__name__ in names), cited[0][1])
    return " ".join(own.split()).rstrip(".")


def summary() -> str:
    """Table 2 in short, as `fedsso paper table2` wrote it."""
    return (RESULTS / "table2-summary.md").read_text()


def convex(task: str) -> str:
    """A table of the convex bench, from convex.json."""
    from benchmarks import convex_report

    found = json.loads((DOCS / "convex.json").read_text())
    return convex_report.table(found, task)


def robustness(table: str, *more: str) -> str:
    """A table of the robustness bench, from robustness.json, by the name of its function."""
    from benchmarks import robustness_report

    found = json.loads((DOCS / "robustness.json").read_text())
    return str(getattr(robustness_report, table)(found, *more))


def campaign(part: str = "") -> str:
    """A table of the campaign, from reliability.json.

    Without a part: one row for each part. With one: what this part was tried on.
    """
    from campaign.table import of_groups, of_parts

    found = json.loads((DOCS / "reliability.json").read_text())
    return of_groups(found, part) if part else of_parts(found)


def layers() -> str:
    """The rooms of the code, from the table that the test of the layers reads."""
    table = tomllib.loads((DOCS / "layers.toml").read_text(encoding="utf-8"))["layer"]
    rows = [
        (str(i), " ".join(f"`{room}`" for room in one["rooms"]), one["knows"])
        for i, one in enumerate(table)
    ]
    return markdown(("layer", "packages", "contents"), rows)


def run_options() -> str:
    """The options of a run, from the record that declares them."""
    rows = []
    for one in options():
        bounds = (
            "" if one.bounds is None else str(one.bounds).removeprefix("lie ").removeprefix("be ")
        )
        choices = ", ".join(one.choices)
        rows.append(
            (f"`{one.name}`", f"`{one.default!r}`", bounds or choices, one.doc.replace("|", "\\|"))
        )
    return markdown(("option", "default", "allowed", "what it does"), rows)


def data_options(owned_by: Iterable[str] = ()) -> str:
    """The options of `load`, from the records that declare them, and who takes each.

    With names of data sets or partitions: only the options that belong to one of these.
    """
    wanted = set(owned_by)
    rows = []
    for one, owners in all_options().items():
        if wanted and wanted.isdisjoint(owners):
            continue
        default = "–" if one.default in (None, "", ()) else f"`{one.default!r}`"
        allowed = ", ".join(one.choices)
        if one.bounds is not None:
            allowed = one.bounds.text
        elif one.least is not None:
            allowed = f">= {one.least}" if one.most == MOST else f"{one.least} to {one.most}"
        takes = ", ".join(f"`{owner}`" for owner in owners) or "all"
        doc = one.doc.replace("|", "\\|")
        rows.append((f"`{one.name}`", default, plain(allowed), takes, doc))
    return markdown(("option", "default", "allowed", "taken by", "what it does"), rows)


def reference() -> str:
    """The entries of all algorithms in the reference; what their methods do is on their pages."""
    entry = "\n::: fedsso.{}\n    options: {{members: false}}\n"
    return "".join(entry.format(cls.__name__) for cls in ALGORITHMS.values()) + "\n"


TABLES_OF: dict[str, dict[str, Callable[[], str]]] = {
    "api.md": {"algorithms": reference},
    "algorithms.md": {"table": algorithms},
    "design.md": {"layers": layers},
    "options.md": {"run": run_options, "data": data_options},
    "datasets.md": {
        "sets": sets,
        "options of data sets": lambda: data_options(one.name for one in datasets()),
        "options of partitions": lambda: data_options(PARTITIONS),
        "smoke": smoke,
    },
    "robustness.md": {
        "shares": partial(robustness, "shares"),
        "duels": partial(robustness, "duels"),
        "judging": partial(robustness, "table", "judging"),
        "finding": partial(robustness, "table", "finding"),
    },
    "convex.md": {task: partial(convex, task) for task in ("phishing", "a9a", "ijcnn1")},
    "reliability.md": {
        "campaign": campaign,
        **{part: partial(campaign, part) for part in ("kills", "damage", "environment")},
    },
    "../results/README.md": {"table2-summary": summary},
}


def page(name: str) -> str:
    """A page with new tables."""
    text = (DOCS / name).read_text()
    for mark, table in TABLES_OF[name].items():
        begin = f"<!-- {mark}: python docs/build.py -->\n"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{table()}{END}{rest.partition(END)[2]}"
    return text


# ---- one page for each algorithm ----


def algorithm_page(name: str) -> str:
    """All that the code says of one algorithm: its docstrings, those of files beside it, its
    fields, its costs, and the lines that carry the paper's."""
    cls = ALGORITHMS[name]
    file = Path(str(getmodule(cls).__file__))
    title = (getdoc(cls) or "").partition("\n")[0]
    code = source(cls, file.read_text(encoding="utf-8"))
    parts = [
        f"# {cls.__name__}",
        f"{plain(title)} *{plain(paper(cls))}.*",
        prose(str(getmodule(cls).__doc__)),
        f"## Use\n\n{usage(name)}",
        f"## Hyper-parameters\n\n{markdown(FIELDS, hyper_rows(cls))}",
        f"## A round\n\n{round_costs(name)}",
    ]
    for heading, module in BESIDE.get(name, {}).items():
        parts.append(f"## {plain(heading)}\n\n{beside(module)}")
    if lines := cited(code):
        parts.append(f"## Line by line\n\n{markdown(('paper', 'code', ''), lines)}")
    parts.append(
        f"## The code\n\nFrom `{file.relative_to(DOCS.parent)}`:\n\n```python\n{code}\n```"
    )
    return "\n\n".join(parts) + "\n"


def plain(text: str) -> str:
    """Text that Markdown leaves as it is, but for code between backticks."""

    def shown(found: re.Match[str]) -> str:
        if found["angle"]:
            return escape(found["angle"])
        return found["code"] or f"\\{found['mark']}"

    return SPECIAL.sub(shown, text)


def prose(doc: str) -> str:
    """A module's docstring without the citation: first its table of symbols."""
    _, symbols, *rest = doc.split("\n\n")
    assert symbols.startswith("    "), f"a table of symbols, indented, below the citation: {doc}"
    rows = symbol_rows(symbols)
    table = markdown(("symbol", "meaning"), rows)
    names = {name for symbol, _ in rows for name in re.findall(r"\w+", symbol)}
    return "\n\n".join([table, *paragraphs(rest, names)])


def beside(module: ModuleType) -> str:
    """The docstring of a file beside an algorithm's own, and which file it is."""
    file = Path(str(module.__file__)).relative_to(DOCS.parent)
    told = paragraphs(str(module.__doc__).strip().split("\n\n"), ("drift",))
    target = Path("..", "..", file).as_posix()  # site.py leads it to where the site has the file
    link = f"[`{file}`]({target})"
    return "\n\n".join([*told, f"The code is in {link}."])


def paragraphs(parts: Iterable[str], symbols: Collection[str]) -> Iterator[str]:
    """Paragraphs of a docstring for Markdown; formulas, which are indented, as TeX.

    Words among the symbols are names of numbers, other words within formulas are English.
    """
    block = script(DOCS / "formulas.py").block
    for part in parts:
        yield block(part, symbols) if part.startswith("  ") else plain(part)


def symbol_rows(text: str) -> list[tuple[str, str]]:
    """Two pairs of columns, symbol and meaning, below each other; a line may have the right pair
    alone."""
    left, right = [], []
    for line in dedent(text).splitlines():
        pairs = iter(re.split(r" {2,}", line.strip()))
        found = [
            (f"`{symbol}`", plain(meaning)) for symbol, meaning in zip(pairs, pairs, strict=True)
        ]
        (left if not line.startswith(" ") else right).append(found[0])
        right += found[1:]
    return left + right


def usage(name: str) -> str:
    """One command and the same in Python."""
    model = "mlp" if name == "fedper" else "mclr"
    shell = f"fedsso run --algorithm {name} --model {model} --rounds 20"
    data = "digits"
    if ALGORITHMS[name]().asks() == "rows":  # it takes models with one output
        model = "linear"
        data = "synthetic"
        shell = f"fedsso run --dataset {data} --algorithm {name} --model {model} --rounds 20"
    record = f"fedsso.{ALGORITHMS[name].__name__}()"
    call = f'fedsso.simulate(fedsso.load("{data}"), "{model}", {record}, rounds=20)'
    return f"```sh\n{shell}\n```\n\n```python\nimport fedsso\n\nrun = {call}\n```"


def hyper_rows(cls: type) -> list[tuple[str, ...]]:
    """The fields of a record."""
    rows = []
    for f in fields_of(cls):
        default = "none" if f.default is None else f.default
        rows.append(
            (
                f"`{f.name}`",
                f"`--{f.name.replace('_', '-')}`",
                f"`{default}`",
                plain(f.metadata["doc"]),
            )
        )
    return rows


def round_costs(name: str) -> str:
    """What travels and what stays, for a model of d parameters."""
    row = cost_rows()[name]
    assert row.theory is not None
    exchanges, down, up = row.theory[:3]
    needs = ALGORITHMS[name].needs_all
    absent = (
        f"All clients must answer in every round; `{needs}` bears absence."
        if needs
        else "Clients may be absent."
    )
    count = f"{exchanges} exchange{'s' if str(exchanges) != '1' else ''}"
    model = ", model `mlp`" if name == "fedper" else ""
    remembered = row.theory.per_client
    of_server = f", the server {remembered} numbers for each client," if remembered else ""
    return (
        f"{count}; to each client {down} numbers, from each client {up}; a client keeps "
        f"{row.theory.client} numbers{of_server} "
        f"until the next round (the paper's counts, default settings{model}). {absent}"
    )


@cache
def cost_rows() -> dict[str, Row]:
    """What a round of each algorithm costs, for `mlp`, or `mclr` where it takes linear models."""
    found = {row.algorithm: row for row in costs("mlp").rows}
    linear = [name for name, row in found.items() if row.theory is None]
    return found | {row.algorithm: row for row in costs("mclr", linear).rows}


def cited(code: str) -> list[tuple[str, str, str]]:
    """The lines of code whose comment names a line of the paper."""
    found, algorithm = [], ""
    for line in code.splitlines():
        if match := CITED.search(line):
            algorithm = match["where"].rpartition(", ")[0] or algorithm
            where = f"{algorithm}, {match['where'].rpartition(', ')[2]}"
            found.append((where, f"`{match['code'].strip()}`", plain(match["note"] or "")))
    return found


def source(cls: type, text: str) -> str:
    """A class and all that its module defines for it, in the order of the file."""
    body = [
        n
        for n in ast.parse(text).body
        if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.Assign)
    ]
    nodes = {name: node for node in body for name in defined(node) if name != "log"}
    needed, todo = set(), [cls.__name__]
    while todo:
        node = nodes[todo.pop()]
        needed.add(node)
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} & nodes.keys()
        todo += [n for n in names if nodes[n] not in needed and not registered(n)]
    lines = text.splitlines()
    parts = [(n, "\n".join(lines[first_line(n) - 1 : n.end_lineno])) for n in body if n in needed]
    return "".join(
        part + ("\n" if isinstance(n, ast.Assign) else "\n\n\n") for n, part in parts
    ).rstrip()


def defined(node: ast.stmt) -> list[str]:
    """The names that a statement of a module defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    return [
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    ]


def first_line(node: ast.stmt) -> int:
    """Where a definition begins, its decorators included."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def registered(name: str) -> bool:
    """Whether a class has a page of its own."""
    return any(cls.__name__ == name for cls in ALGORITHMS.values())


# ---- pictures ----


def figures() -> None:
    """The pictures of the idea, of the fixed points, by the example that draws it, and of MNIST, if
    it is there."""
    if any(d.present() for d in datasets() if d.name == "mnist"):
        picture(load("mnist"), DOCS / "mnist-paper-20.png")
    script(DOCS.parent / "examples" / "fixed_points.py").main(DOCS)
    script(DOCS / "pictures.py").main(DOCS)


@cache
def script(path: Path) -> ModuleType:
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


if __name__ == "__main__":
    for name in TABLES_OF:
        (DOCS / name).write_text(page(name))
    if "--figures" in sys.argv:
        figures()
