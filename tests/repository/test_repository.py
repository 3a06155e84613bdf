"""The files around the code agree with it: citation, forms, hooks, the steps of CONTRIBUTING.md,
links, paths."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

import fedsso

ROOT = Path(__file__).resolve().parents[2]
IGNORED = [
    line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split() if line.endswith("/")
]
STEPS = ("An algorithm", "A data set", "A model")
SYSTEM = {"bin", "dev", "etc", "proc", "usr"}  # of every machine
EXAMPLES = {"absolute", "data", "path", "scratch", "srv"}  # folders of the user, in examples
HOSTILE = {
    "tests/data/test_data_fetch.py",
    "tests/data/test_data_images.py",
}  # archives that try to get out
BINARY = {".gz", ".npz", ".pdf", ".png", ".pyc"}
ABSOLUTE = re.compile(r"""(?:^|[\s"'`=(,:])/([A-Za-z][\w.-]*)/[\w.-]""", re.MULTILINE)
UPWARDS = re.compile(r"(?<![\w./])(?:\.\./)+[\w./-]*")


def walk() -> Iterator[Path]:
    """The files of the repository, without what git ignores."""
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if name != ".git" and not any(fnmatch(name, i) for i in IGNORED)
        ]
        yield from (Path(folder, name) for name in files if name != ".git")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


FILES = sorted(walk())
PAGES = [path for path in FILES if path.suffix == ".md"]
FORMS = [
    path for path in FILES if path.parent.name == "ISSUE_TEMPLATE" and path.name != "config.yml"
]


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def in_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@cache
def tokens(path: Path) -> tuple[Token, ...]:
    """A page's tokens, those within lines among them."""
    return tuple(
        t
        for block in MarkdownIt().parse(path.read_text())
        for t in (block, *(block.children or ()))
    )


@cache
def anchors(path: Path) -> frozenset[str]:
    """What a link into a page can name, by GitHub's rule: repeated headings are numbered."""
    slugs: list[str] = []
    headings = [
        title
        for t, title in zip(tokens(path), tokens(path)[1:], strict=False)
        if t.type == "heading_open"
    ]
    for heading in headings:
        text = "".join(child.content for child in heading.children or ())
        slugs.append(re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-"))
    found = [
        f"{slug}-{n}" if (n := slugs[:i].count(slug)) else slug for i, slug in enumerate(slugs)
    ]
    return frozenset({*found, *re.findall(r'<a (?:id|name)="([^"]+)"', path.read_text())})


def links(path: Path) -> list[str]:
    """The links and pictures of a page that do not lead to another site."""
    found = [
        str(t.attrs.get("href") or t.attrs.get("src"))
        for t in tokens(path)
        if t.type in ("link_open", "image")
    ]
    return [unquote(link) for link in found if not re.match(r"[a-z]+:", link)]


def broken(path: Path, root: Path = ROOT) -> list[str]:
    """The links of a page that lead nowhere, or out of the repository."""
    found = []
    for link in links(path):
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        there = target.exists() and target.is_relative_to(root)
        if not there or (anchor and (target.suffix != ".md" or anchor not in anchors(target))):
            found.append(link)
    return found


def outside(text: str, folder: Path) -> list[str]:
    """The paths in a text, of a file in this folder, that are neither the repository's nor those of
    any machine."""
    climbing = [
        path for path in UPWARDS.findall(text) if not (folder / path).resolve().is_relative_to(ROOT)
    ]
    return [
        *climbing,
        *(f"/{first}" for first in ABSOLUTE.findall(text) if first not in SYSTEM | EXAMPLES),
    ]


def commands(path: Path) -> str:
    """All code of a page."""
    return "\n".join(t.content for t in tokens(path) if t.type in ("code_inline", "fence"))


# --- citation
# --------------------------------------------------------------------------------------------------
def test_the_citation_is_that_of_this_version() -> None:
    cited, own = in_yaml(ROOT / "CITATION.cff"), project()
    assert cited["title"] == own["name"]
    assert cited["version"] == own["version"] == fedsso.__version__
    assert cited["abstract"] == own["description"]
    assert cited["license"] == own["license"]
    assert cited["keywords"] == own["keywords"]
    assert cited["authors"] == own["authors"]


def test_the_paper_is_cited_as_everywhere_else() -> None:
    (paper,) = in_yaml(ROOT / "CITATION.cff")["references"]
    (number,) = re.findall(r"\d{4}\.\d{5}", paper["url"])
    head = fedsso.algorithms.fedsso.__doc__ or ""
    assert (
        f'{paper["authors"][0]["family-names"]} et al., "{paper["title"]}", arXiv {number}'
        in " ".join(head.split())
    )
    assert f"({paper['url']})" in (ROOT / "README.md").read_text()
    assert [one["value"] for one in paper["identifiers"]] == [f"arXiv:{number}"]
    assert 2000 + int(number[:2]) == paper["year"]
    assert int(number[2:4]) == paper["month"]


# --- forms and hooks
# -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path.suffix in (".yml", ".yaml", ".cff")],
    ids=lambda path: name_of(path),
)
def test_yaml_files_parse(path: Path) -> None:
    assert isinstance(
        yaml.compose(path.read_text()), yaml.MappingNode
    )  # tags of other tools are not resolved


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_each_question_once(path: Path) -> None:
    form = in_yaml(path)
    questions = [part for part in form["body"] if part["type"] != "markdown"]
    assert form["name"]
    assert form["description"]
    assert len({part["id"] for part in questions}) == len(
        {part["attributes"]["label"] for part in questions}
    )
    assert len({part["id"] for part in questions}) == len(questions) > 0
    assert any(part.get("validations", {}).get("required") for part in questions)


def test_there_are_two_forms() -> None:
    assert [path.stem for path in FORMS] == ["bug", "feature"]


def test_hooks_are_targets_of_the_makefile() -> None:
    """Nothing is fetched before a commit, and a commit is checked as `.ci/run` checks it."""
    (repo,) = in_yaml(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local"
    entries = [hook["entry"] for hook in repo["hooks"]]
    assert entries == ["make check"]
    assert entries[0] in (ROOT / ".ci" / "run").read_text().splitlines()


# --- pages
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_between_pages_lead_somewhere(path: Path) -> None:
    assert broken(path) == []


def test_make_has_the_targets_that_pages_name() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        target
        for page in PAGES
        for target in re.findall(r"(?m)(?:^|`)make ([a-z-]+)", commands(page))
    }
    assert {"test", "check", "format", "docs"} <= named <= targets


def section(title: str) -> str:
    """A section of CONTRIBUTING.md."""
    _, found, rest = (ROOT / "CONTRIBUTING.md").read_text().partition(f"\n## {title}\n")
    assert found, title
    return rest.partition("\n## ")[0]


@pytest.mark.parametrize("title", STEPS)
def test_the_steps_name_files_that_exist(title: str) -> None:
    """Tables named in capitals, and tests, are in a file that the same step links to."""
    items = re.split(r"\n(?=\d\. |- |For free)", section(title))
    steps = [item for item in items if re.match(r"\d\. ", item)]
    assert len(steps) >= 4
    for item in items:
        named = [ROOT / target for target in re.findall(r"\]\(([^)#]+)\)", item)]
        assert all(path.exists() for path in named), item
        assert named or not re.match(r"\d\. ", item), f"no file: {item}"
        code = "\n".join(path.read_text() for path in named if path.suffix == ".py")
        for name in re.findall(r"`([A-Z]{5,}|__all__|test_\w+)`", item):
            assert re.search(rf"^(def )?{name}\b", code, re.MULTILINE), (
                f"{name} is not in the files of: {item}"
            )


def test_the_names_in_the_steps_are_looked_up() -> None:
    """The test above would be worthless if it found none."""
    names = {name for title in STEPS for name in re.findall(r"`([A-Z]{5,})`", section(title))}
    assert {"ALGORITHMS", "THEORY", "NAMES", "MODELS", "LEVERS"} <= names


# --- paths
# --------------------------------------------------------------------------------------------------
def test_no_file_names_a_path_outside_the_repository() -> None:
    texts = [
        path
        for path in FILES
        if path.suffix not in BINARY | {".js"} and name_of(path) not in HOSTILE
    ]
    found = {name_of(path): outside(path.read_text(), path.parent) for path in texts}
    assert {name: paths for name, paths in found.items() if paths} == {}
    assert {"README.md", "Makefile", ".ci/run", "src/fedsso/cli/main.py"} <= found.keys()


# --- the checks themselves
# -------------------------------------------------------------------------------------------
def test_paths_that_lead_out_are_found() -> None:
    home, up = "/" + "home/someone/x", "../" * 3
    assert outside(f'folder = "{home}"', ROOT / "docs") == ["/home"]
    assert outside(f"see {up}elsewhere", ROOT / "docs") == [f"{up}elsewhere"]
    assert outside("see ../src and /usr/bin/env and https://a.b/c/d, 1/2/3", ROOT / "docs") == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# Two `words`, β\n\n# Same\n\n# Same\n\n# Same\n")
    good = [
        "b.md",
        "b.md#two-words-β",
        "b.md#same",
        "b.md#same-1",
        "b.md#same-2",
        "#own",
        "https://x.y/none",
    ]
    bad = ["c.md", "b.md#same-3", "b.md#Same", "#other", "..", "b.md/x"]
    page = tmp_path / "a.md"
    page.write_text(
        "# Own\n\n"
        + "\n".join(f"- [link]({link})" for link in [*good, *bad])
        + "\n\n`[code](none.md)`\n"
    )
    assert broken(page, tmp_path) == bad


def test_no_merge_was_left_half_done() -> None:
    mark = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)
    for path in walk():
        if path.suffix not in BINARY:
            assert not mark.search(path.read_text(errors="replace")), path
