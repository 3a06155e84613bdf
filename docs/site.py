"""Makes the site: all pages as plain Markdown, then HTML of them by Zensical, then the formulas.

    python docs/site.py [FOLDER]    # writes FOLDER/site; without a folder build/site

The pages of docs/ link to files of the repository (`../examples/own_model.py`,
`../results/README.md`), which GitHub shows. The site shows them too: a page of results/ as it is, a
file of code as a page under source/. All pages are first written to FOLDER/pages with links that
lead there, so that any program that reads Markdown can make a site of them. A warning of Zensical,
a formula that KaTeX refuses, and a page that loads something from a network end the build.
"""

from __future__ import annotations

import importlib.util
import posixpath
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
ROW = re.compile(r"(?m)^\| `([a-z0-9-]+)` \|")
LOADED = re.compile(
    r"""<(?:script|link|img|iframe)\b[^>]*\s(?:src|href)="?(?:https?:)?//[^\s">]+"""
)
CELL = re.compile(
    r'<(?P<tag>t[dh])(?P<more>(?: style="[^"]*")?)>(?P<inside>.*?)</(?P=tag)>', re.DOTALL
)
PRINTED = re.compile(r'<div class="highlight"><pre>.*?</pre>', re.DOTALL)
WORD = re.compile(r"<code>([^<\n]{1,26})</code>")  # such as `--device cpu`
GAP = re.compile(r"(?<=\S) {2,}(?=\S)")
TAG = re.compile(r"<[^>]+>")
NUMBERS = re.compile(r"[\d\s.,:;()±–−+/%·×<>≤≥-]{1,60}")  # they stay on one line, too
LENGTHS = {  # the classes of cells and of headings, by the least number of characters
    "td": {"longer": 120, "long": 60, "medium": 27, "short": 0},
    "th": {"wordy": 14, "": 0},
}
WIDE = (
    "index.md",
    "algorithms.md",
    "robustness.md",
    "results/",
)  # pages whose tables need the room
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "sh", ".md": "markdown"}
SHIPPED = {".css", ".js", ".md", ".png", ".svg", ".woff2"}
AT_BUILD = {"katex.min.js"}  # sets the formulas, and is not needed to read them


def main(folder: Path = ROOT / "build") -> None:
    """Write the pages and the site of them into a folder, without what it had of both."""
    site = folder / "site"
    shutil.rmtree(folder / "pages", ignore_errors=True)
    shutil.rmtree(site, ignore_errors=True)
    write_pages(folder / "pages")
    config = folder / "mkdocs.yml"
    config.write_text(configuration(), encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(
        [*command, "--config-file", str(config)], cwd=ROOT, capture_output=True, text=True
    )
    complaints = [done.stdout + done.stderr] if done.returncode else checked(site)
    if complaints:
        sys.exit("\n".join(complaints))


def checked(site: Path) -> list[str]:
    """Set the formulas, the cells and the printed tables of a site; tell what is wrong with it."""
    for page in site.rglob("*.html"):
        text = CELL.sub(measured, page.read_text(encoding="utf-8"))
        text = WORD.sub(r'<code class="short">\1</code>', PRINTED.sub(unwrapped, text))
        page.write_text(text, encoding="utf-8")
    return [*script("formulas.py").typeset(site), *loaded(site)]


def script(name: str) -> ModuleType:
    """A file beside this one."""
    spec = importlib.util.spec_from_file_location(f"docs_{Path(name).stem}", DOCS / name)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


# ---- the pages as Markdown ----


def write_pages(folder: Path) -> None:
    """Every page of the site and what it shows, by its place in the site."""
    build = script("build.py")
    for path in sorted(DOCS.rglob("*")):
        if path.suffix in SHIPPED and path.name not in AT_BUILD:
            put(folder / path.relative_to(DOCS), path.read_bytes())
    put(folder / "katex" / "LICENSE.txt", (DOCS / "katex" / "LICENSE").read_bytes())
    for name in build.ALGORITHMS:
        put(folder / f"algorithms/{name}.md", build.algorithm_page(name).encode())
    results = set((ROOT / "results").glob("*.md"))
    linked = {target for page in {*DOCS.glob("*.md"), *results} for target in targets(page)}
    beside = {module for modules in build.BESIDE.values() for module in modules.values()}
    for path in sorted(linked | results | {Path(str(module.__file__)) for module in beside}):
        asis = place(path).startswith("results/") or path.is_relative_to(DOCS)
        put(folder / place(path), path.read_bytes() if asis else code(path).encode())
    for page in folder.rglob("*.md"):
        uri = page.relative_to(folder).as_posix()
        page.write_text(adapted(page.read_text(encoding="utf-8"), uri), encoding="utf-8")


def put(path: Path, content: bytes) -> None:
    """Write a file, with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def targets(page: Path) -> set[Path]:
    """The files of the repository that a page links to."""
    found = (
        (page.parent / target).resolve()
        for target, _ in LINK.findall(page.read_text(encoding="utf-8"))
    )
    return {path for path in found if path.exists() and path.is_relative_to(ROOT)}


def place(path: Path) -> str:
    """Where the site has a file of the repository."""
    inside = path.relative_to(ROOT).as_posix()
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    if inside == "results/README.md":  # as an index it would have no line in the menu
        return "results/tables.md"
    return inside if inside.startswith("results/") else f"source/{inside}.md"


def code(path: Path) -> str:
    """A file, or the files of a folder, to read."""
    shown = sorted(p for p in path.rglob("*") if p.suffix in LANGUAGES) if path.is_dir() else [path]
    parts = [f"# {path.relative_to(ROOT).as_posix()}\n"]
    for one in shown:
        if path.is_dir():
            parts.append(f"## {one.relative_to(path).as_posix()}\n")
        text = one.read_text(encoding="utf-8").rstrip()
        parts.append(f"````{LANGUAGES.get(one.suffix, 'text')}\n{text}\n````\n")
    return "\n".join(parts)


def adapted(text: str, uri: str) -> str:
    """A page whose links to files of the repository lead to where the site has them."""
    home = ROOT if uri.startswith("results/") else DOCS
    here = posixpath.dirname(uri)

    def moved(found: re.Match[str]) -> str:
        path = (home / here / found[1]).resolve()
        if not path.exists() or not path.is_relative_to(ROOT):
            return found[0]
        return posixpath.relpath(place(path), here or ".") + (found[2] or "")

    if uri == "algorithms.md":
        text = ROW.sub(r"| [`\1`](algorithms/\1.md) |", text)
    text = LINK.sub(moved, text)
    hidden = ["navigation", "toc"] if uri == "index.md" else ["toc"]
    if uri.startswith(WIDE):
        text = f"---\nhide: {hidden}\n---\n\n{text}"
    return text


def configuration() -> str:
    """mkdocs.yml, with a line of the menu for each algorithm and where the code is."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    lines = [
        f"      - {cls.__name__}: algorithms/{name}.md"
        for name, cls in script("build.py").ALGORITHMS.items()
    ]
    text = text.replace("      # one page for each\n", "\n".join(lines) + "\n")
    for inside in ("src", "docs/doctests.py"):
        text = text.replace(f"[{inside}]", f"['{ROOT / inside}']")
    return text


# ---- the site ----


def measured(cell: re.Match[str]) -> str:
    """A cell of a table that says by its class how long its text is: site.css sets it by that."""
    text = unescape(re.sub(r"\\[a-z]+|[{}]", "", TAG.sub("", cell["inside"]))).strip()
    lengths = LENGTHS[cell["tag"]]
    length = 0 if NUMBERS.fullmatch(text) else len(text)
    kind = next(kind for kind, least in lengths.items() if length >= least)
    if not kind:
        return cell[0]
    return f'<{cell["tag"]} class="{kind}"{cell["more"]}>{cell["inside"]}</{cell["tag"]}>'


def unwrapped(block: re.Match[str]) -> str:
    """A block of code that has columns, which must not be wrapped, says so by its class."""
    lines = TAG.sub("", block[0]).splitlines()
    columns = [line for line in lines if len(GAP.findall(line)) > 1]
    return (
        block[0].replace('"highlight"', '"highlight columns"', 1) if len(columns) > 1 else block[0]
    )


def loaded(site: Path) -> list[str]:
    """What pages would load from a network, with the page: a line for each."""
    return [
        f"{page.relative_to(site)} loads {tag}"
        for page in sorted(site.rglob("*.html"))
        for tag in LOADED.findall(page.read_text(encoding="utf-8"))
    ]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
