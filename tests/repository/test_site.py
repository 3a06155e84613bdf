"""The site: its formulas, its tables, its links, and that it needs no network."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

from fedsso.algorithms import ALGORITHMS

ROOT = Path(__file__).resolve().parents[2]
BUILDERS = ("zensical", "py_mini_racer", "mkdocstrings")  # the extra `docs`


def script(name: str) -> ModuleType:
    """A file of docs/."""
    spec = importlib.util.spec_from_file_location(f"site_{Path(name).stem}", ROOT / "docs" / name)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


class Page(HTMLParser):
    """The places that a page names, its anchors, and the cells of its tables."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.assets: list[str] = []
        self.anchors: set[str] = set()
        self.rows: list[list[str]] = []
        self.inside = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.anchors |= {named[name] for name in ("id", "name") if name in named}
        if tag == "a" and "href" in named:
            self.links.append(named["href"])
        elif tag in ("link", "script", "img", "iframe", "source"):
            self.assets += [named[name] for name in ("href", "src", "srcset") if named.get(name)]
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


# ---- formulas of docstrings ----


@pytest.mark.parametrize(
    ("plain", "tex"),
    [
        ("x <- x - eta B^-1 g", r"x \leftarrow x - \eta B^{-1} g"),
        ("g_{k-1}^T s", r"g_{k-1}^{\top} s"),
        ("v = beta2 v + (1 - beta2) delta^2", r"v = \beta_{2} v + (1 - \beta_{2}) \delta^{2}"),
        ("m / (sqrt(v) + eps)", r"m / (\sqrt{v} + \varepsilon)"),
        ("<g - grad f_i(x), y>", r"\langle g - \nabla f_{i} (x), y \rangle"),
        ("|y - x|^2", r"\lVert y - x \rVert^{2}"),
        ("0 <= w <= 0.6", r"0 \le w \le 0.6"),
        ("sum_S w_i (Delta_i - y_i)", r"\sum_{S} w_{i} (\Delta_{i} - y_{i})"),
        ("y_i = z for the clients of S", r"y_{i} = z \text{ for the clients of } S"),
        ("drift / (tau L)", r"\mathit{drift} / (\tau L)"),
    ],
)
def test_a_plain_formula_becomes_tex(plain: str, tex: str) -> None:
    assert script("formulas.py").tex(plain, {"drift"}) == tex


def test_lines_of_formulas_are_aligned_and_sentences_stay() -> None:
    block = script("formulas.py").block
    two = block("    m = beta m + g\n    x = x - m        in every round\n")
    assert two.splitlines()[0] == "```math"
    assert r"m &= \beta m + g \\" in two
    assert r"x &= x - m \qquad \text{in every round }" in two.replace("round}", "round }")
    words = "    lead   the first client solves the system\n    none   nobody does\n"
    assert block(words) == "```\nlead   the first client solves the system\nnone   nobody does\n```"


def test_a_formula_that_katex_refuses_is_told(tmp_path: Path) -> None:
    pytest.importorskip("py_mini_racer", reason="formulas need the extra docs")
    good = r'<div class="arithmatex">\[a &lt; \frac{1}{2}\]</div>'
    bad = r'<span class="arithmatex">\(\frac{1}\)</span>'
    (tmp_path / "good.html").write_text(good, encoding="utf-8")
    (tmp_path / "bad.html").write_text(bad, encoding="utf-8")
    assert script("formulas.py").typeset(tmp_path) == [r"bad.html: \frac{1}"]
    shown = (tmp_path / "good.html").read_text(encoding="utf-8")
    assert shown.startswith('<div class="formula"><span class="katex-display">')
    assert "katex-error" not in shown


# ---- the filter ----


def test_the_filter_and_the_table_have_the_same_columns() -> None:
    asked = re.findall(r'column: "(.+?)"', (ROOT / "docs" / "filter.js").read_text())
    assert len(asked) == 4
    assert set(asked) < set(script("build.py").HEAD)


def test_the_facts_of_the_filter() -> None:
    """Known cases of each fact: Newton's methods need Hessians, SCAFFOLD twice the bytes."""
    build = script("build.py")
    rows = [row.split(" | ") for row in build.algorithms().splitlines()[2:]]
    assert [row[0].strip("|` ") for row in rows] == list(ALGORITHMS)
    facts = {row[0].strip("|` "): dict(zip(build.HEAD[1:], row[1:], strict=True)) for row in rows}
    second = {name for name, told in facts.items() if told["second derivatives"] == "yes"}
    assert {"fednl", "giant", "done", "fedpm", "disco", "nl1", "bl2"} <= second
    assert second.isdisjoint({"fedsso", "fedavg", "scaffold", "fedsophia", "feddane"})
    assert facts["scaffold"]["extra bytes"] == facts["bl1"]["extra bytes"] == "yes"
    assert facts["fedsso"]["extra bytes"] == facts["fedexp"]["extra bytes"] == "no"
    assert facts["scaffold"]["client keeps"] == "d"
    assert facts["fednl"]["some clients absent"] == "no: use fednl-pp"


# ---- the first page ----


def test_the_first_page_has_the_numbers_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    told = dict(re.findall(r"(?m)^\| (Fed\w+)[^|]*\|[^|]*\| ([\d.]+) \|$", readme))
    page = (ROOT / "docs" / "index.md").read_text()
    bars = re.findall(
        r'<th>(\w+)</th>.*?<span style="--rounds: ([\d.]+)"></span>([\d.]+)', page, re.DOTALL
    )
    assert {name: shown for name, _, shown in bars} == told
    assert all(length == shown for _, length, shown in bars)


# ---- the built site ----


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly."""
    for name in BUILDERS:
        pytest.importorskip(name, reason="the site needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(ROOT / "docs" / "site.py"), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


@pytest.mark.full
def test_the_site_is_whole(site: Path) -> None:
    """Every page is there, links and assets lead to files of the site, and anchors exist."""
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    names = {path.relative_to(site).as_posix() for path in pages}
    assert {"index.html", "results/tables.html", "algorithms.html", "api.html"} <= names
    assert {f"algorithms/{name}.html" for name in ALGORITHMS} <= names
    assert not list(site.rglob("robustness.json"))
    broken = []
    for path, page in pages.items():
        assert not [asset for asset in page.assets if urlsplit(asset).netloc], path
        for place in (*page.links, *page.assets):
            parts = urlsplit(place)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            known = pages[target].anchors if target in pages else {anchor}
            if not target.is_file() or (anchor and anchor not in known):
                broken.append(f"{path.relative_to(site)}: {place}")
    assert broken == []


@pytest.mark.full
def test_style_sheets_load_files_of_the_site(site: Path) -> None:
    named = 0
    for sheet in site.rglob("*.css"):
        for address in re.findall(r"url\(['\"]?([^'\")]+)", sheet.read_text(encoding="utf-8")):
            if not address.startswith(("data:", "#")):
                assert (sheet.parent / address).is_file(), f"{sheet.name}: {address}"
                named += 1
    assert named >= 20  # KaTeX's fonts
    assert "MIT" in (site / "katex" / "LICENSE.txt").read_text()
    assert not (site / "katex" / "katex.min.js").exists()


@pytest.mark.full
def test_formulas_are_set(site: Path) -> None:
    shown = 0
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert "katex-error" not in text, path
        assert 'class="arithmatex"' not in text, path
        shown += text.count('class="katex-display"')
    assert shown >= 30  # those of the algorithms' docstrings alone


@pytest.mark.full
def test_the_table_of_algorithms_is_complete_without_scripts(site: Path) -> None:
    rows = Page(site / "algorithms.html").rows
    (head,) = [place for place, row in enumerate(rows) if "second derivatives" in row]
    names = [row[0].strip() for row in rows[head + 1 : head + 1 + len(ALGORITHMS)]]
    assert names == list(ALGORITHMS)
    assert all(len(row) == len(rows[head]) for row in rows[head : head + 1 + len(ALGORITHMS)])


@pytest.mark.full
def test_the_filter_and_the_search_work_from_the_disk(site: Path, tmp_path: Path) -> None:
    """In a browser, without a server: ticked boxes leave the rows that meet them."""
    browser = shutil.which("chromium")
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("run `make browser`")
    from selenium import webdriver
    from selenium.webdriver import ActionChains
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"):
        options.add_argument(argument)
    options.add_argument("--disable-background-networking")
    options.add_argument(f"--user-data-dir={tmp_path}")
    window = webdriver.Chrome(options=options, service=Service(driver))
    try:
        window.get((site / "algorithms.html").as_uri())
        told = window.find_element("css selector", ".filter output")
        count = len(ALGORITHMS)
        assert told.text == f"{count} of {count}"
        boxes = window.find_elements("css selector", ".filter input")
        boxes[0].click()
        boxes[3].click()
        rows = window.find_elements("css selector", "table td:first-child a code")
        shown = {row.text for row in rows if row.is_displayed()}
        assert {"fedsso", "fedavg", "fedexp"} <= shown
        assert shown.isdisjoint({"scaffold", "fednew", "giant"})
        assert told.text == f"{len(shown)} of {count}"
        window.get((site / "index.html").as_uri())
        found = "return document.activeElement.shadowRoot?.textContent || ''"
        opened = "return Boolean(document.activeElement.shadowRoot?.querySelector('input'))"
        wait = WebDriverWait(window, 60)
        ActionChains(window).send_keys("/").perform()
        wait.until(lambda _: window.execute_script(opened))
        ActionChains(window).send_keys("curvature").perform()
        wait.until(
            lambda _: re.match(
                r"\d+ results.*curvature", str(window.execute_script(found)), re.DOTALL
            )
        )
    finally:
        window.quit()
