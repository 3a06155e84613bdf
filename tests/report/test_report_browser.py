"""The report page in a real browser: it draws, answers to mouse and keyboard, fits a phone and
stays at home.

Screenshots go to build/screenshots.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_report_page import big

import fedsso
import fits
from fedsso.experiment.results import holding, recipe
from fedsso.experiment.trace import Trace
from fedsso.regression.result import Regression
from fedsso.report.page import Content, Entry, Served, write
from fedsso.report.tables import Curve

webdriver = pytest.importorskip("selenium.webdriver", reason="run `make browser`")
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if BROWSER is None or DRIVER is None:
    pytest.skip("run `make browser`", allow_module_level=True)

from selenium.webdriver.chrome.options import Options  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

SHOTS = Path(__file__).parents[2] / "build" / "screenshots"
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
VISIBLE = "return [...new Set(document.getElementById('chart').data.map(t => t.name))]"
SHOWN = """
  const lines = document.getElementById('chart').data.filter(t => !t.fill);
  return lines.map(t => [t.name, [...t.x], [...t.y]])
"""


class Window:
    """A browser window with the few things that the tests do."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(
        self, path: Path, width: int = 1200, *, dark: bool = False, drawn: bool = True
    ) -> None:
        """Open a page; with `drawn`, wait until a script has drawn its first chart."""
        self.size(width, 900)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"media": "", "features": [scheme]}
        )
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(path.as_uri())
        if drawn:
            self.wait("return performance.getEntriesByName('first-chart').length")

    def size(self, width: int, height: int) -> None:
        how = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", how)

    def run(self, script: str, *args: object) -> Any:
        return self.driver.execute_script(script, *args)

    def wait(self, script: str) -> None:
        WebDriverWait(self.driver, 120).until(lambda _: self.run(script))

    def click(self, text: str, within: str = "curves") -> None:
        """A button, or the label of an option, by its words and its section."""
        found = (
            f"//section[@id={within!r}]//*[self::button or self::label][normalize-space()={text!r}]"
        )
        self.driver.find_element("xpath", found).click()

    def shoot(self, name: str) -> None:
        """The whole page, with everything on it drawn."""
        width = self.run("return innerWidth")
        self.size(width, self.run("return document.documentElement.scrollHeight"))
        self.wait(
            "return [...document.querySelectorAll('.chart')].every(c => !c.offsetParent || "
            "c.querySelector('svg'))"
        )
        time.sleep(0.4)  # the sizes settle
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(SHOTS / f"{name}.png"))
        self.size(width, 900)


@pytest.fixture(scope="module")
def window() -> Iterator[Window]:
    options = Options()
    options.binary_location = BROWSER
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.execute_cdp_cmd("Network.enable", {})
    yield Window(driver)
    driver.quit()


def synthetic(rate: float, seed: int, ys: bool, diverged: int | None = None) -> Trace:
    """Accuracy 0.95 (1 - e^(-rate k)) with a little noise; a round sends 2 MB."""
    draw = np.random.default_rng(seed)
    rows = []
    for k in range(41):
        gone = diverged is not None and k >= diverged
        accuracy = 0.95 * (1 - math.exp(-rate * k)) + 0.02 * draw.random()
        row = {
            "trial": 0,
            "seed": seed,
            "round": k,
            "overridden": 0,
            "skipped": int(ys and k % 9 == 5),
        }
        row |= {
            "test_accuracy": 0.0 if gone else accuracy,
            "train_loss": math.nan if gone or not k else 2 * math.exp(-rate * k),
        }
        row |= {
            "bytes_up": 10**6 * (k > 0),
            "bytes_down": 10**6 * (k > 0),
            "seconds": 0.5 * (k > 0),
        }
        rows.append(row | ({"ys": math.exp(-k / 9), "radius": 1 + k / 9} if ys else {}))
    return Trace.from_rows(rows, diverged=diverged)


@pytest.fixture(scope="module")
def small(tmp_path_factory: Any) -> Path:
    """Three algorithms with three seeds, one run of which diverges, and a federation."""
    curves = [
        Curve("fedsso alpha=0.1", tuple(synthetic(0.4, seed, True) for seed in range(3)), "fedsso"),
        Curve(
            "fedavg alpha=0.3", tuple(synthetic(0.15, seed, False) for seed in range(3)), "fedavg"
        ),
        Curve(
            "scaffold alpha=3",
            (synthetic(0.2, 0, False), synthetic(0.2, 1, False, diverged=12)),
            "scaffold",
        ),
    ]
    fed = fedsso.load("digits", clients=10, seed=0)
    runs = fedsso.compare(fed, "mclr", ["fedavg"], seeds=range(3), rounds=1, device="cpu")
    (setting,) = runs.settings()
    held = holding(fed)
    assert held is not None
    path: Path = tmp_path_factory.mktemp("page") / "small.html"
    text = "Three algorithms on the same clients and mini-batches."
    entries = [Entry(curve) for curve in curves]
    write(
        path,
        Content(entries, "Three algorithms", text, None, [], [held], [recipe(setting)]),
    )
    return path


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("page") / "sweep.html"
    write(path, big())
    return path


@pytest.fixture(autouse=True)
def _nothing_wrong_and_nobody_asked(window: Window) -> Iterator[None]:
    """After each test: no message in the console, and no request but for the page itself."""
    yield
    assert window.driver.get_log("browser") == []
    asked = []
    for entry in window.driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            asked.append(message["params"]["request"]["url"])
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert asked, "the log of requests holds not even the page"
    assert window.run("return performance.getEntriesByType('resource').map(e => e.name)") == []


def test_curves_are_drawn(window: Window, small: Path) -> None:
    window.open(small)
    assert window.run(VISIBLE) == ["fedsso alpha=0.1", "fedavg alpha=0.3", "scaffold alpha=3"]
    # per curve a mean; bands for the two with three calm seeds; scaffold: mean of one, a lost run
    # and its cross
    assert (
        window.run("return document.querySelectorAll('#chart .scatterlayer .trace').length")
        == 2 + 2 + 4
    )
    mean = window.run(SHOWN)[0]
    expected = np.mean([synthetic(0.4, seed, True)["test_accuracy"] for seed in range(3)], 0)
    np.testing.assert_allclose(mean[2], expected, rtol=1e-6)
    cross = next(t for t in window.run(SHOWN) if len(t[1]) == 1)
    assert cross[1] == [11]  # the last round before divergence
    window.shoot("desktop-light")


def test_a_curve_is_switched_off_and_on(window: Window, small: Path) -> None:
    window.open(small)
    window.click("fedavg alpha=0.3")
    assert window.run(VISIBLE) == ["fedsso alpha=0.1", "scaffold alpha=3"]
    pressed = (
        "return [...document.querySelectorAll('.chip')].map(c => c.getAttribute('aria-pressed'))"
    )
    assert window.run(pressed) == ["true", "false", "true"]
    window.click("fedavg alpha=0.3")
    assert len(window.run(VISIBLE)) == 3
    window.click("None")
    assert window.run(VISIBLE) == []
    window.click("All")
    assert len(window.run(VISIBLE)) == 3


def test_axes_and_metrics_change_what_is_drawn(window: Window, small: Path) -> None:
    window.open(small)
    assert window.run(SHOWN)[0][1] == list(range(41))
    window.click("Megabytes")
    assert window.run(SHOWN)[0][1] == [2 * k for k in range(41)]
    window.click("Seconds")
    assert window.run(SHOWN)[0][1] == [0.5 * k for k in range(41)]
    window.click("Training loss")
    _, x, y = window.run(SHOWN)[0]
    assert len(x) == 40  # round 0 has no training loss
    np.testing.assert_allclose(y, [2 * math.exp(-0.4 * k) for k in range(1, 41)], rtol=1e-6)
    kind = (
        "return ['x', 'y'].map(a => document.getElementById('chart')._fullLayout[a + 'axis'].type)"
    )
    assert window.run(kind) == ["linear", "log"]  # a loss is logarithmic unless one says otherwise
    window.click("vertical")
    window.click("horizontal")
    assert window.run(kind) == ["log", "linear"]


def test_the_goal_of_a_sweep_is_marked_and_named(window: Window, tmp_path: Path) -> None:
    """Also where a target just above it is, whose name would overlap, and on a grid line."""
    curve = Curve("fedsso", (synthetic(0.4, 0, True),), "fedsso")
    write(tmp_path / "goal.html", Content([Entry(curve)], targets=[0.5, 0.91], goal=0.9))
    window.open(tmp_path / "goal.html")
    look = "const look = document.getElementById('chart').layout; "
    assert window.run(look + "return look.annotations.map(a => a.text)") == ["0.9", "0.5"]
    lines = window.run(look + "return look.shapes.map(s => [s.y0, s.layer])")
    assert lines == [[0.5, "above"], [0.9, "above"], [0.91, "above"]]


@pytest.mark.parametrize("width", [1200, 390])
def test_the_values_below_a_map_of_one_row_can_be_read(
    window: Window, tmp_path: Path, width: int
) -> None:
    """Twelve client steps, as the paper's grid has them: none is turned, cut off or overlapped."""
    own = (synthetic(0.4, 0, False),)
    steps = [digit * 10**-power for power in (4, 3, 2, 1) for digit in (1, 3, 7)]
    entries = [Entry(Curve(f"fedavg {a:g}", own, "fedavg"), {"alpha": a}) for a in steps]
    write(tmp_path / "line.html", Content(entries))
    window.open(tmp_path / "line.html", width)
    window.run("document.getElementById('maps').scrollIntoView()")
    window.wait("return document.querySelector('#maps .xtitle')")
    boxes = """
      const map = document.querySelector('#maps .chart');
      const edges = node => {
        const box = node.getBoundingClientRect();
        return [box.left, box.right, box.top, box.bottom]
      };
      const ticks = [...map.querySelectorAll('.xtick text')].map(edges);
      return [ticks, edges(map.querySelector('.xtitle')), edges(map)]
    """
    ticks, title, chart = window.run(boxes)
    assert len(ticks) >= 4
    for left, right in itertools.pairwise(ticks):
        assert left[1] <= right[0]
    for tick in ticks:
        assert tick[1] - tick[0] > tick[3] - tick[2]  # wider than high
        assert tick[3] <= title[2] + 2
    assert title[3] <= chart[3]


def test_curvature_follows_the_legend(window: Window, small: Path) -> None:
    window.open(small)
    titles = "return [...document.querySelectorAll('#diagnostics h3')].map(h => h.textContent)"
    assert window.run(titles) == ["yᵀs", "radius", "skipped pairs"]
    window.run("document.getElementById('diagnostics').scrollIntoView()")
    window.wait("return document.querySelector('#diagnostics .chart').data")
    window.wait(
        "return document.querySelector('#diagnostics .chart').data.length === 2"
    )  # a line and its band
    window.run("scrollTo(0, 0)")
    window.click("fedsso alpha=0.1")
    assert not window.driver.find_element(
        "id", "diagnostics"
    ).is_displayed()  # the others have none
    window.click("fedsso alpha=0.1")
    assert window.driver.find_element("id", "diagnostics").is_displayed()


COLUMN = """
  const rows = [...document.querySelectorAll('tbody tr')];
  return rows.map(row => row.cells[arguments[0]].dataset.value)
"""
SORTED = "return document.querySelectorAll('thead th')[arguments[0]].getAttribute('aria-sort')"


def test_the_table_sorts(window: Window, small: Path) -> None:
    window.open(small)
    buttons = window.driver.find_elements("css selector", "thead button")
    last = len(buttons) - 1
    buttons[4].click()  # the highest accuracy, which one seed of scaffold misses
    values = window.run(COLUMN, 4)
    assert values[2] == ""
    assert float(values[0]) < float(values[1])
    assert window.run(SORTED, 4) == "ascending"
    buttons[4].click()
    assert window.run(COLUMN, 4) == [values[1], values[0], ""]  # what was not reached stays last
    buttons[last].click()
    assert [window.run(SORTED, i) for i in (4, last)] == ["none", "descending"]
    finals = [float(v) for v in window.run(COLUMN, last)]
    assert finals == sorted(finals, reverse=True)


def test_everything_works_by_keyboard(window: Window, small: Path) -> None:
    window.open(small)

    def focused() -> Any:
        return window.driver.switch_to.active_element

    window.driver.find_element("css selector", "#metric input:checked").send_keys(Keys.ARROW_RIGHT)
    assert (
        window.run("return document.querySelector('#metric input:checked').parentNode.textContent")
        == "Training loss"
    )
    assert len(window.run(SHOWN)[0][1]) == 40
    seen = []
    for _ in range(12):
        focused().send_keys(Keys.TAB)
        node = focused()
        seen.append(node.get_attribute("class") or node.get_attribute("name"))
        outline = """
          const node = arguments[0], seen = node.matches('input') ? node.nextSibling : node;
          return getComputedStyle(seen).outlineStyle
        """
        assert window.run(outline, node) == "solid", seen  # one sees where one is
        if node.get_attribute("class") == "chip":
            break
    focused().send_keys(Keys.SPACE)
    assert window.run(VISIBLE) == ["fedavg alpha=0.3", "scaffold alpha=3"]
    header = window.driver.find_elements("css selector", "thead button")[-1]
    header.send_keys(Keys.ENTER)
    assert "descending" in window.run(
        "return [...document.querySelectorAll('thead th')].map(h => h.ariaSort)"
    )
    summary = window.driver.find_element("css selector", "#settings summary")
    summary.send_keys(Keys.ENTER)
    assert "fedsso run --config" in window.driver.find_element("css selector", "#settings pre").text


@pytest.mark.full
def test_a_phone_needs_no_sideways_scrolling(window: Window, small: Path, sweep: Path) -> None:
    for path in (sweep, small):
        window.open(path, 360)
        for node in window.driver.find_elements("css selector", "details"):
            window.run("arguments[0].open = true", node)
        assert window.run("return [document.documentElement.scrollWidth, innerWidth]") == [360, 360]
        wide = """
          const charts = [...document.querySelectorAll('.chart')];
          return charts.filter(c => c.getBoundingClientRect().right > 360).length
        """
        assert window.run(wide) == 0
    window.open(small, 360)
    window.shoot("phone")


def test_a_table_that_is_too_wide_says_so(window: Window, small: Path) -> None:
    hints = (
        "return [...document.querySelectorAll('.sideways')].map(hint => hint.offsetParent !== null)"
    )
    window.open(small, 360)
    assert window.run(hints) == [True]
    window.size(1200, 900)
    window.wait(f"return (() => {{ {hints} }})().every(seen => !seen)")
    window.size(360, 900)
    window.wait(f"return (() => {{ {hints} }})().every(seen => seen)")


def test_many_columns_scroll_inside_their_tables(window: Window, tmp_path: Path) -> None:
    """Twenty targets and twelve settings: the page stays as wide as the window."""
    traces = (synthetic(0.1, 0, True), synthetic(0.1, 1, True))
    curves = [Curve(f"fedavg alpha={i / 10}", traces, "fedavg", 60) for i in range(10)]
    served = Served(["Graz", "Ulm"], [300, 200], [100, 70], "accuracy", [0.91, 0.87])
    entries = [Entry(curve, by_client=lambda: served) for curve in curves]
    targets = [i / 100 for i in range(50, 90, 2)]
    write(tmp_path / "wide.html", Content(entries, targets=targets))
    sizes = """
      const tables = [...document.querySelectorAll('.table')];
      const right = t => t.getBoundingClientRect().right;
      return tables.map(t => [t.scrollWidth > t.clientWidth, right(t) <= innerWidth])
    """
    for width in (360, 1200):
        window.open(tmp_path / "wide.html", width)
        assert window.run("return document.documentElement.scrollWidth") == width
        assert window.run(sizes) == [[True, True], [True, True]]
    window.shoot("wide")
    # The table of clients sorts like the others, by what its cells are worth.
    names = "return [...document.querySelectorAll('#clients tbody th')].map(th => th.textContent)"
    assert window.run(names) == ["Graz", "Ulm"]
    window.run("document.querySelectorAll('#clients thead button')[1].click()")
    assert window.run(names) == ["Ulm", "Graz"]


def test_dark_mode_reaches_the_charts(window: Window, small: Path) -> None:
    look = """
      const chart = document.getElementById('chart');
      return [getComputedStyle(document.body).backgroundColor, chart._fullLayout.font.color]
    """
    window.open(small)
    light = window.run(look)
    window.open(small, dark=True)
    dark = window.run(look)
    assert all(one != other for one, other in zip(light, dark, strict=True))
    ink = [int(dark[1][i : i + 2], 16) for i in (1, 3, 5)]
    assert min(ink) > 180  # light letters
    window.shoot("desktop-dark")
    light_again = [{"name": "prefers-color-scheme", "value": "light"}]
    window.driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"media": "", "features": light_again}
    )
    window.wait(f"return document.getElementById('chart')._fullLayout.font.color === {light[1]!r}")


@pytest.mark.full
def test_paper_is_light_and_has_everything(window: Window, small: Path) -> None:
    window.open(small, 703, dark=True)
    scheme = [{"name": "prefers-color-scheme", "value": "dark"}]
    window.driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"media": "print", "features": scheme}
    )
    window.run("dispatchEvent(new Event('beforeprint'))")
    assert window.run("return document.querySelectorAll('details:not([open])').length") == 0
    assert window.run(
        "return [...document.querySelectorAll('.chart')].every(c => c.querySelector('svg'))"
    )
    assert window.run("return document.getElementById('chart')._fullLayout.font.color") == "#1b2027"
    assert window.run("return document.getElementById('chart')._fullLayout.width") < 703
    window.shoot("print")
    window.run("dispatchEvent(new Event('afterprint'))")
    assert window.run("return document.querySelectorAll('details[open]').length") == 0


def test_names_stay_names(window: Window, tmp_path: Path) -> None:
    """Also where Plotly, which understands a few tags, shows them."""
    evil = "<img src=x onerror='window.bad=1'></script><script>window.bad=1</script>"
    evil += "<a href='javascript:1'>%{x}$y"
    rows = tuple(synthetic(0.4, seed, True) for seed in range(2))
    entries = [
        Entry(Curve(f"{i} {evil}", rows, f"x{evil}"), {"alpha": f"{i}{evil}", evil: 1})
        for i in range(4)
    ]
    fed = fedsso.load("digits", clients=2, seed=0)
    held = holding(fed)
    assert held is not None
    write(
        tmp_path / "evil.html",
        Content(entries, evil, evil, None, [evil], [held._replace(clients=[evil, evil])]),
    )
    window.open(tmp_path / "evil.html")
    window.size(1200, 5000)
    window.wait(
        "return [...document.querySelectorAll('.chart')].every(c => c.querySelector('svg'))"
    )
    chip = window.driver.find_element("css selector", ".chip")
    assert chip.text == f"0 {evil}"
    place = """
      const box = document.querySelector('#chart .nsewdrag').getBoundingClientRect();
      return [box.x, box.y]
    """
    x, y = (edge + 99 for edge in window.run(place))
    window.driver.execute_cdp_cmd(
        "Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y}
    )
    window.wait(
        "return document.querySelector('#chart .hoverlayer').textContent.includes('onerror')"
    )
    assert window.run("return [window.bad, document.querySelectorAll('img, a').length]") == [
        None,
        0,
    ]
    window.size(1200, 900)


def test_nothing_can_be_sent_from_the_charts(window: Window, small: Path) -> None:
    """Plotly can upload a chart; the page has no such button, no logo with a link, and no address
    for it."""
    window.open(small)
    titles = window.run(
        "return [...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title)"
    )
    assert "Download plot as a PNG" in titles
    assert not [
        title for title in titles if "hare" in title or "loud" in title or "Plotly" in title
    ]
    assert window.run("return document.getElementById('chart')._context.plotlyServerURL") == ""
    assert window.run("return document.querySelectorAll('a').length") == 0


def test_a_sweep_is_drawn_with_little_work(window: Window, sweep: Path) -> None:
    """Of all trials one is drawn at first."""
    assert sweep.stat().st_size < 4_000_000
    window.open(sweep)
    assert window.run("return document.querySelectorAll('#chart .scatterlayer .trace').length") == 1


@pytest.mark.full
def test_a_sweep_shows_its_best_and_the_rest_on_demand(window: Window, sweep: Path) -> None:
    window.open(sweep)
    assert len(window.run(VISIBLE)) == 1
    window.click("All")
    assert len(window.run(VISIBLE)) == 84
    window.click("The best")
    assert len(window.run(VISIBLE)) == 1
    window.run("document.getElementById('maps').scrollIntoView()")
    window.wait("return document.querySelector('#maps .chart').data")
    cells = "return document.querySelector('#maps .chart').data[1].text"
    before = window.run(cells)
    assert len(before) == 84
    window.click("final accuracy", "maps")
    assert window.run(cells) != before
    place = """
      const box = document.querySelector('#maps .nsewdrag').getBoundingClientRect();
      return [box.left + box.width / 14, box.top + box.height / 24]
    """
    x, y = window.run(place)  # the middle of the first of 12 × 7 cells
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        mouse = {
            "type": kind,
            "x": x,
            "y": y,
            "button": "left" if kind != "mouseMoved" else "none",
            "clickCount": 1,
        }
        window.driver.execute_cdp_cmd("Input.dispatchMouseEvent", mouse)
        time.sleep(0.2)
    window.wait("return new Set(document.getElementById('chart').data.map(t => t.name)).size === 2")
    assert "fedsso alpha=0.0001 eta=0.01" in window.run(VISIBLE)
    window.run("scrollTo(0, 0)")
    window.shoot("sweep")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, False), (1280, True)])
def test_the_page_of_a_regression_fits_and_its_forest_has_one_axis(
    window: Window, tmp_path: Path, width: int, dark: bool
) -> None:
    page = tmp_path / "regression.html"
    Regression(fits.binomial()).report(page)
    window.open(page, width, dark=dark, drawn=False)
    assert window.run("return document.documentElement.scrollWidth") == width
    edges = window.run(
        "return [...document.querySelectorAll('.track')].map(t => t.getBoundingClientRect())"
        ".map(r => `${r.left.toFixed(1)} ${r.width.toFixed(1)}`)"
    )
    assert len(edges) == 5  # four terms and the axis
    assert len(set(edges)) == 1
    wide = "return [...document.querySelectorAll('svg.plot')].map(s => s.clientWidth)"
    assert min(window.run(wide)) > 250
    window.shoot(f"regression-{width}{'-dark' if dark else ''}")
