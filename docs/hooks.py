"""What MkDocs asks while it builds the site: pages made from the code, and pages for files outside
docs/.

The pages of docs/ link to files of the repository (`../examples/own_model.py`,
`../results/README.md`), which GitHub shows. The site shows them too: a page of results/ as it is, a
file of code as a page under source/.
"""

from __future__ import annotations

import importlib.util
import posixpath
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
ROW = re.compile(r"(?m)^\| `([a-z-]+)` \|")
WIDE = ("algorithms.md", "robustness.md", "results/")  # pages whose tables need the room
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "sh", ".md": "markdown"}


def _build() -> ModuleType:
    """docs/build.py."""
    spec = importlib.util.spec_from_file_location("docs_build", DOCS / "build.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def on_config(config: Any) -> Any:
    """The navigation gains a line for each algorithm."""
    names = _build().ALGORITHMS
    for entry in config.nav:
        if "Algorithms" in entry:
            entry["Algorithms"] += [
                {cls.__name__: f"algorithms/{name}.md"} for name, cls in names.items()
            ]
    return config


def on_files(files: Any, config: Any) -> Any:
    """The algorithms' pages, those of results/, and every file of the repository that a page links
    to."""
    build = _build()
    for name in build.ALGORITHMS:
        files.append(
            File.generated(config, f"algorithms/{name}.md", content=build.algorithm_page(name))
        )
    results = set((ROOT / "results").glob("*.md"))
    linked = {target for page in {*DOCS.glob("*.md"), *results} for target in _targets(page)}
    for path in sorted(linked | results):
        if not path.is_relative_to(DOCS):
            files.append(_generated(path, config))
    return files


def _targets(page: Path) -> set[Path]:
    """The files of the repository that a page links to."""
    found = (
        (page.parent / target).resolve()
        for target, _ in LINK.findall(page.read_text(encoding="utf-8"))
    )
    return {path for path in found if path.exists() and path.is_relative_to(ROOT)}


def _place(path: Path) -> str:
    """Where the site has a file of the repository."""
    inside = path.relative_to(ROOT).as_posix()
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return inside if inside.startswith("results/") else f"source/{inside}.md"


def _generated(path: Path, config: Any) -> File:
    """A page of results/ or one of its pictures and tables as it is, anything else as a page of
    code."""
    place = _place(path)
    if place.startswith("results/"):
        level = InclusionLevel.INCLUDED if path.name == "README.md" else InclusionLevel.NOT_IN_NAV
        return File.generated(config, place, content=path.read_bytes(), inclusion=level)
    return File.generated(config, place, content=_code(path), inclusion=InclusionLevel.NOT_IN_NAV)


def _code(path: Path) -> str:
    """A file, or the files of a folder, to read."""
    shown = sorted(p for p in path.rglob("*") if p.suffix in LANGUAGES) if path.is_dir() else [path]
    parts = [f"# {path.relative_to(ROOT).as_posix()}\n"]
    for one in shown:
        if path.is_dir():
            parts.append(f"## {one.relative_to(path).as_posix()}\n")
        text = one.read_text(encoding="utf-8").rstrip()
        parts.append(f"````{LANGUAGES.get(one.suffix, 'text')}\n{text}\n````\n")
    return "\n".join(parts)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files of the repository lead to where the site has them."""
    uri = page.file.src_uri
    home = ROOT if uri.startswith("results/") else DOCS
    here = posixpath.dirname(uri)

    def moved(found: re.Match[str]) -> str:
        path = (home / here / found[1]).resolve()
        if not path.exists() or not path.is_relative_to(ROOT):
            return found[0]
        return posixpath.relpath(_place(path), here or ".") + (found[2] or "")

    if uri.startswith(WIDE):
        page.meta["hide"] = ["toc"]
    if uri == "algorithms.md":
        markdown = ROW.sub(r"| [`\1`](algorithms/\1.md) |", markdown)
    return LINK.sub(moved, markdown)


def on_post_build(config: Any) -> None:
    """Write the index of the search as a script as well.

    A page that is opened from the disk may load a script, but no JSON.
    """
    folder = Path(config.site_dir) / "search"
    text = (folder / "search_index.json").read_text(encoding="utf-8")
    (folder / "search_index.js").write_text(f"var __index = {text}", encoding="utf-8")
