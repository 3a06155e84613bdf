"""The report page: what it shows is what the runs hold, whatever they are called and wherever they
come from."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter(
        "ignore", DeprecationWarning
    )  # typer imports names that click 9 will no longer have
    from typer.testing import CliRunner

    from fedsso.cli.main import app

import fedsso
from fedsso import report
from fedsso.algorithm import hyper
from fedsso.algorithms import ALGORITHMS
from fedsso.errors import InputError
from fedsso.experiment.trace import Trace
from fedsso.report.by_client import by_client as report_by_client
from fedsso.report.page import ASSETS, Content, Entry, Holding, Recipe, Served, page
from fedsso.report.page.view import View
from fedsso.report.sources import content
from fedsso.report.styles import OWN, style
from fedsso.report.tables import Curve

NAN = math.nan
EVIL = "</script><script>alert('x')</script><!--\"&{y}$z %{x} \u2028"
HERE = Path(__file__).parents[1]


def trace(*accuracies: float, diverged: int | None = None, **columns: float) -> Trace:
    """Round k moves 1 MB up and 0.5 MB down, takes 2 seconds and has the loss 1/k."""
    rows = [
        {"trial": 0, "seed": 0, "round": k, "overridden": 0, "skipped": 0, "seconds": 2.0 * (k > 0)}
        | {"test_accuracy": a, "train_loss": 1 / k if k else NAN}
        | {"bytes_up": 1_000_000 * (k > 0), "bytes_down": 500_000 * (k > 0), **columns}
        for k, a in enumerate(accuracies)
    ]
    return Trace.from_rows(rows, diverged=diverged)


SSO = Curve(
    "FedSSO", (trace(0.1, 0.5, 0.9, 0.9, ys=0.25), trace(0.1, 0.8, 0.9, 0.7, ys=0.5)), "fedsso"
)
AVG = Curve("FedAvg", (trace(0.1, 0.5, 0.6, 0.7, 0.8),), "fedavg")
LOST = Curve("FedDANE", (trace(0.1, 0.5, 0, 0, diverged=2),), "feddane")


class Outline(HTMLParser):
    """Tags, attributes, text and scripts of a page; fails on tags that do not match."""

    EMPTY = ("meta", "input", "line")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.scripts, self.parts = "", list[str](), dict[str, list[str]]()
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.text += data
            self.parts.setdefault(self.open[-1], []).append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


def embedded(html: str) -> dict[str, Any]:
    """The data as a browser reads them."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    found: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return found


def series(data: dict[str, Any], curve: int, seed: int, name: str) -> np.ndarray:
    place = data["curves"][curve]["traces"][seed]["columns"][name]
    return np.frombuffer(b64decode(data["arrays"][place]), "<f4")


def of(*curves: Curve, **more: Any) -> str:
    return page(Content([Entry(curve) for curve in curves], **more))


# ---- the numbers ----


def test_every_series_is_that_of_its_trace() -> None:
    data = embedded(of(SSO, AVG))
    for i, curve in enumerate((SSO, AVG)):
        for seed, own in enumerate(curve.traces):
            for name in ("round", "test_accuracy", "train_loss"):
                np.testing.assert_array_equal(
                    series(data, i, seed, name), own[name].astype(np.float32)
                )
    np.testing.assert_array_equal(
        series(data, 1, 0, "megabytes"), [0, 1.5, 3, 4.5, 6]
    )  # 1 + 0.5 a round
    np.testing.assert_array_equal(series(data, 1, 0, "seconds"), [0, 2, 4, 6, 8])
    np.testing.assert_array_equal(series(data, 0, 1, "ys"), [0.5] * 4)
    assert [d["key"] for d in data["diagnostics"]] == [
        "ys"
    ]  # FedAvg has none, and nothing was skipped or overridden
    assert [m["key"] for m in data["metrics"]] == [
        "test_accuracy",
        "train_loss",
    ]  # no test loss was measured


def test_equal_series_stand_in_the_page_once() -> None:
    """Three runs of four rows share rounds, megabytes, seconds and losses; the accuracies are their
    own."""
    curves = [Curve(str(i), (trace(0.1, i / 10, 0.5, 0.6),), "fedavg") for i in range(3)]
    assert len(embedded(of(*curves))["arrays"]) == 4 + 3


def test_a_seed_without_skipped_pairs_counts_in_their_mean() -> None:
    seeds = (trace(0.1, 0.2, skipped=1), trace(0.1, 0.3), trace(0.1, 0.4))
    data = embedded(of(Curve("x", seeds, "fedsso"), AVG))
    for seed, skipped in enumerate((1, 0, 0)):
        assert series(data, 0, seed, "skipped").tolist() == [skipped] * 2
        assert "overridden" not in data["curves"][0]["traces"][seed]["columns"]
    assert "skipped" not in data["curves"][1]["traces"][0]["columns"]


def test_own_metrics_are_metrics() -> None:
    data = embedded(of(Curve("x", (trace(0.1, 0.2, test_f1_score=0.5),), "fedavg")))
    assert {"key": "test_f1_score", "name": "f1 score"} in data["metrics"]


def test_what_is_not_finite_stays_out_of_the_json() -> None:
    wild = Curve(
        "wild",
        (trace(0.1, NAN, NAN, radius=math.inf), trace(0.1, NAN, diverged=1, ys=1e300)),
        "fedsso",
    )
    data = embedded(of(wild, Curve("empty", (Trace.from_rows([]),), "fedavg")))
    assert data["curves"][0]["traces"][1]["diverged"] == 1
    assert np.isinf(series(data, 0, 1, "ys")).all()  # beyond single precision


def test_cards_tell_the_main_findings() -> None:
    html = of(SSO, AVG, LOST, targets=[0.5, 0.8])
    values = re.findall(r'<h3>(.*?)</h3><p class="value">(.*?)</p>', html)
    # finals: (0.9 + 0.7) / 2 and 0.8; FedDANE reaches 0.5 in round 1, so 0.5 is the highest target
    # of all three;
    # FedSSO is there after 1 and 1 rounds, FedAvg after 1; both send 1.5 MB until then
    assert values == [
        ("Best final accuracy", "0.8000"),
        ("Fewest rounds to 0.5", "1"),
        ("Bytes against FedAvg", "+0%"),
        ("Diverged", "1 of 4"),
    ]
    two = dict(re.findall(r'<h3>(.*?)</h3><p class="value">(.*?)</p>', of(SSO, AVG, targets=[0.8])))
    assert two["Fewest rounds to 0.8"] == "1.5"  # 2 and 1
    assert two["Bytes against FedAvg"] == "−62%"  # 2.25 MB against 6 MB


def test_cards_and_the_first_table_are_about_the_same_settings() -> None:
    """Twelve settings: the best at the end is not the fastest, by which the best are chosen."""
    fast = Curve("fast", (trace(0.1, 0.8, 0.81),), "fedsso")
    others = [Curve(f"slow {i}", (trace(0.1, 0.5, 0.8 + i / 100),), "fedsso") for i in range(11)]
    html = of(fast, *others, AVG, targets=[0.8])
    values = dict(re.findall(r'<h3>(.*?)</h3><p class="value">(.*?)</p>', html))
    assert values["Best final accuracy"] == "0.8100"
    assert values["Fewest rounds to 0.8"] == "1"
    table, *_ = re.findall(r"<tbody>(.*?)</tbody>", html, re.S)
    assert re.findall(r'class="best" data-value="[^"]*">(.*?)<', table) == ["1", "0.8100"]


def test_what_a_colleague_looks_for_comes_before_the_diagnostics() -> None:
    served = Served(["a"], [3], [1], "accuracy", [0.5])
    html = page(Content([Entry(SSO, by_client=lambda: served)], recipes=[Recipe("x", "y")]))
    found = re.findall(r'<section id="(\w+)"', html)
    assert found == ["curves", "tables", "maps", "clients", "holdings", "diagnostics", "settings"]


def test_one_seed_is_no_mean_and_the_same_seeds_say_so() -> None:
    one = of(AVG, targets=[0.5])
    assert "reaches it; a dash: it is not reached." in one
    assert "over the seeds" not in Outline(one).text
    twice = of(AVG._replace(traces=AVG.traces * 2), targets=[0.5])
    assert "mean ± standard deviation over the seeds" in twice
    assert "FedAvg: all seeds gave the same run." in twice
    assert "± 0" not in Outline(twice).text


def test_data_are_named_by_their_files(tmp_path: Path) -> None:
    for city in ("Graz", "Ulm"):
        path = tmp_path / "heart" / f"{city}.csv"
        path.parent.mkdir(exist_ok=True)
        path.write_text("age,ill\n63,yes\n48,no\n52,no\n47,yes\n")
    for files, name in (("heart", "heart"), ("heart/Ulm.csv", "Ulm.csv")):
        fed = fedsso.load("csv", files=str(tmp_path / files), outcome="ill", min_rows=1)
        run = fedsso.simulate(fed, "mclr", "fedavg", rounds=1, device="cpu")
        fedsso.Results([run]).report(tmp_path / "page.html")
        html = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert f'<p class="about">{name} · 1 setting · ' in html
        assert embedded(html)["holdings"][0]["title"].startswith(f"{name}, ")


def test_of_equally_few_bytes_the_better_end_has_the_card() -> None:
    worse = Curve("worse", (trace(0.1, 0.8, 0.8),), "fedsso")
    better = Curve("better", (trace(0.1, 0.8, 0.9),), "fedsso")
    html = of(worse, better, AVG, targets=[0.8])
    (card,) = re.findall(r"<h3>Bytes against FedAvg</h3>(.*?)</div>", html)
    assert "better: 1.5 MB to 0.8, FedAvg 6 MB" in card


def test_the_page_says_what_final_means() -> None:
    told = (
        "Final accuracy: the mean of the last 10 evaluations, of a short run that of its last "
        "quarter"
    )
    assert f'<p class="hint">{told}.</p>' in of(SSO)


def test_cards_without_fedavg_accuracy_or_bytes() -> None:
    assert "Bytes against FedAvg" not in of(SSO)
    blank = {
        "trial": 0,
        "seed": 0,
        "overridden": 0,
        "skipped": 0,
        "bytes_up": 0,
        "bytes_down": 0,
        "train_loss": 1.0,
    }
    silent = Curve("x", (Trace.from_rows([{**blank, "round": k} for k in range(3)]),), "fedavg")
    html = of(silent)
    assert "Best final" not in html
    assert "0 of 1" in html
    assert embedded(html)["axes"] == ["round"]


def test_without_any_accuracy_the_test_loss_takes_its_place(tmp_path: Path) -> None:
    """Real targets: the table, a card and the maps have the loss at the end."""
    draw = np.random.default_rng(0)
    clients = [(draw.random((20, 3)), draw.random(20)) for _ in range(3)]
    fed = fedsso.Federation.from_clients(clients)
    grid = fedsso.grid("fedavg", {"alpha": [0.001, 0.003, 0.01, 0.03]})
    many = fedsso.sweep(fed, "linear", grid, rounds=5, seeds=(0, 1), device="cpu")
    best = many.best()
    told = many.table().splitlines()
    assert told[0] == "| algorithm | megabytes | final test loss |"
    assert len(told) == 2 + 4
    assert f"| {best.final('test_loss'):.4g}" in "".join(told)
    many.report(tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    cards = re.findall(r'<h3>(.*?)</h3><p class="value">(.*?)</p>', html)
    assert cards[0] == ("Smallest final test loss", f"{best.final('test_loss'):.4g}")
    assert re.findall(r'class="best" data-value="(.*?)"', html) == [str(best.final("test_loss"))]
    data = embedded(html)
    assert (data["final"], data["judged"]) == ("final test loss", "final")
    ends = [setting.final("test_loss") for setting in many.settings()]
    assert [curve["final"] for curve in data["curves"]] == ends


def test_the_table_is_that_of_report() -> None:
    outline = Outline(of(SSO, AVG, LOST, targets=[0.5, 0.8]))
    rows = report.rounds_table([SSO, AVG, LOST], [0.5, 0.8])
    assert outline.parts["button"] == list(rows[0])
    assert outline.parts["td"] == [text for row in rows for text in list(row.values())[1:]]
    values = [cell["data-value"] for cell in outline.all("td")]
    assert values[:4] == ["1.0", "1.5", "2.25", str((0.9 + 0.7) / 2)]
    assert values[-3:-1] == ["", "1.5"]  # FedDANE misses 0.8 and has sent 1.5 MB to 0.5
    assert [th["aria-sort"] for th in outline.all("th") if th["scope"] == "col"] == ["none"] * 5


def test_of_many_settings_the_best_of_each_algorithm_is_drawn_first() -> None:
    """Curve i of each algorithm reaches 0.8 in round i + 2; the first of each is the fastest."""

    def late(i: int) -> Trace:
        return trace(*([0.1] * (i + 2)), *([0.8] * (10 - i)))

    curves = [
        Curve(f"{name} {i}", (late(i),), name)
        for name in ("fedsso", "fedavg")
        for i in reversed(range(6))
    ]
    html = of(*curves, targets=[0.8])
    data = embedded(html)
    assert [c["label"] for c in data["curves"] if c["shown"]] == ["fedsso 0", "fedavg 0"]
    shown = {c["algorithm"]: c["color"] for c in data["curves"] if c["shown"]}
    assert shown == {name: report.style(name).color for name in ("fedsso", "fedavg")}
    assert Outline(html).parts["caption"] == ["Best setting of each algorithm", "All settings"]
    assert all(c["shown"] for c in embedded(of(*curves[:10]))["curves"])


def test_a_grid_becomes_maps() -> None:
    """Two axes are a map of places; a third gives a map for each value; a field with one value is
    no axis."""
    grid = product(("bfgs", "dfp"), (1.0, 0.3), (0.1, 0.01, 1.0))
    hypers = [{"m": 20, "alpha": a, "eta": e, "form": f} for f, e, a in grid]
    entries = [Entry(Curve(str(i), (trace(0.1, 0.9),), "fedsso"), h) for i, h in enumerate(hypers)]
    first, second = embedded(page(Content(entries)))["maps"]
    assert first["title"] == "fedsso form=bfgs"
    assert (first["down"], first["rows"]) == ("α", ["0.01", "0.1", "1"])
    assert (first["across"], first["columns"]) == ("η", ["0.3", "1"])
    assert first["cells"] == [[4, 1], [3, 0], [5, 2]]
    assert second["cells"] == [[10, 7], [9, 6], [11, 8]]
    (line,) = embedded(
        page(Content([e._replace(hyper={"alpha": float(i)}) for i, e in enumerate(entries)]))
    )["maps"]
    assert line["cells"] == [list(range(12))]
    assert embedded(page(Content([e._replace(hyper={"m": 20}) for e in entries])))["maps"] == []


def test_a_schedule_on_an_axis_looks_as_in_labels(fed: fedsso.Federation, tmp_path: Path) -> None:
    steps = [0.1, 0.3, fedsso.Decay(scale=0.5), fedsso.Decay(scale=1.0, shift=2.0)]
    grid = fedsso.grid("fedavg", {"alpha": steps})
    many = fedsso.sweep(fed, "mclr", grid, rounds=2, device="cpu")
    shown = ["0.1", "0.3", "decay(0.5,0,1)", "decay(1,2,1)"]
    many.report(tmp_path / "page.html")
    (map_,) = embedded((tmp_path / "page.html").read_text(encoding="utf-8"))["maps"]
    assert map_["columns"] == shown
    (heat,) = many.maps(0.5)
    assert heat.rows == shown


def test_maps_show_the_end_where_no_target_is_reached() -> None:
    entries = [
        Entry(Curve(str(i), (trace(0.1, 0.2),), "fedavg"), {"alpha": float(i)}) for i in range(4)
    ]
    assert embedded(page(Content(entries, targets=[0.9])))["judged"] == "final"
    assert embedded(page(Content(entries, targets=[0.2, 0.9], goal=0.9)))["judged"] == "0"


def test_a_third_axis_that_belongs_to_some_settings_only() -> None:
    """Four steps with each of two guards, one of which has a further setting that stands alone: two
    maps of a line."""
    hypers = [{"alpha": float(a), "guard": g} for g in ("adaptive", "none") for a in range(4)]
    hypers = [{**h, "eta": 1.0, "form": "bfgs"} for h in hypers] + [
        {"alpha": 9.0, "guard": "none", "eta": 0.5, "form": "dfp"}
    ]
    entries = [Entry(Curve(str(i), (trace(0.1, 0.9),), "fedsso"), h) for i, h in enumerate(hypers)]
    maps = embedded(page(Content(entries)))["maps"]
    assert [m["title"] for m in maps] == [
        "fedsso guard=adaptive form=bfgs",
        "fedsso guard=none form=bfgs",
    ]
    assert [m["cells"] for m in maps] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]


def test_background_is_in_no_card_and_not_drawn_at_first() -> None:
    """As of a grid that is judged by held-out rows, beside another source."""
    better = Curve("held out", (trace(0.1, 0.99),), "fedavg")
    entries = [Entry(AVG, {}, True, "a"), Entry(better, {}, False, "a"), Entry(SSO, {}, False, "b")]
    html = page(Content(entries, targets=[0.8]))
    assert [c["shown"] for c in embedded(html)["curves"]] == [True, False, True]
    assert '<p class="value">0.8000</p>' in html
    assert "0.9900</p>" not in html


def test_labels_have_their_names_where_there_are_any(tmp_path: Path) -> None:
    for city in ("Graz", "Ulm"):
        (tmp_path / f"{city}.csv").write_text("age,ill\n63,yes\n48,no\n52,no\n")
    fed = fedsso.Federation.from_csv(tmp_path, "ill")
    assert fed.labels == fed.class_names == ("no", "yes")
    run = fedsso.simulate(fed, "mclr", "fedavg", rounds=1, device="cpu")
    fedsso.Results([run]).report(tmp_path / "page.html")
    (held,) = embedded((tmp_path / "page.html").read_text())["holdings"]
    assert held["labels"] == ["no", "yes"]
    # Without names a label is called by its number.
    (plain,) = embedded(of(AVG, holdings=[Holding("x", ["a"], np.ones((1, 3)))]))["holdings"]
    assert plain["labels"] == ["0", "1", "2"]


def test_a_curve_is_drawn_at_first_rather_than_a_dot() -> None:
    """As of a run on Flower, which is evaluated after its last round."""
    once = Curve("on Flower", (trace(NAN, NAN, NAN, 0.8),), "fedsso")
    assert embedded(of(once))["first"] == "train_loss"
    assert embedded(of(AVG, once))["first"] == "test_accuracy"


def test_a_table_without_targets_does_not_promise_rounds_to_them() -> None:
    html = of(Curve("on Flower", (trace(NAN, NAN, 0.8),), "fedsso"))
    assert "<h2>At the end</h2>" in html
    assert "Rounds to an accuracy" not in html
    assert "<h2>Rounds to an accuracy</h2>" in of(AVG)


def test_very_many_clients_are_thinned_out() -> None:
    counts = np.arange(500)[:, None].repeat(2, 1)
    html = of(AVG, holdings=[Holding("big", [f"c{i}" for i in range(500)], counts)])
    (one,) = embedded(html)["holdings"]
    assert one["clients"] == [f"c{i}" for i in [*range(499, 399, -1), *range(99, -1, -1)]]
    assert "100 largest and the 100 smallest of 500" in one["note"]


# ---- one safe file ----


def test_names_cannot_break_out() -> None:
    curve = Curve(EVIL, (trace(0.1, 0.9, **{f"test_{EVIL}": 0.5}),), EVIL)
    entries = [Entry(curve, {EVIL: i, "alpha": EVIL}) for i in range(4)]
    holdings = [Holding(EVIL, [EVIL], np.ones((1, 2)))]
    html = page(Content(entries, EVIL, EVIL, None, [EVIL], holdings, [Recipe(EVIL, EVIL, EVIL)]))
    outline, data = Outline(html), embedded(html)
    assert len(outline.all("script")) == len(outline.scripts) == 3
    assert "alert" not in "".join(outline.scripts[1:])  # they stand in the data alone, as text
    assert outline.parts["h1"] == outline.parts["title"] == [EVIL]
    assert outline.parts["li"] == outline.parts["summary"] == [EVIL]
    assert outline.parts["code"] == [EVIL, EVIL]
    assert [c["label"] for c in data["curves"]] == [EVIL] * 4
    assert data["holdings"][0]["clients"] == [EVIL]
    assert EVIL in data["maps"][0]["across"]


def test_only_the_pages_own_scripts_may_run_and_nothing_may_be_fetched() -> None:
    outline = Outline(of(SSO))
    (policy,) = (
        m["content"] or ""
        for m in outline.all("meta")
        if m.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    digests = [
        b64encode(sha256(script.encode()).digest()).decode() for script in outline.scripts[1:]
    ]
    assert rules["script-src"] == " ".join(f"'sha256-{digest}'" for digest in digests)
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data: blob:"
    assert not {"link", "img", "iframe", "form"} & {tag for tag, _ in outline.tags}
    assert not [
        a
        for _, attributes in outline.tags
        for a in attributes
        if a in ("src", "href") or a.startswith("on")
    ]


def test_the_assets_are_whole() -> None:
    plotly = gzip.decompress((ASSETS / "plotly-cartesian.min.js.gz").read_bytes()).decode()
    assert "plotly.js (cartesian - minified) v4.1.1" in plotly[:200]
    assert "MIT License" in (ASSETS / "plotly-LICENSE.txt").read_text()
    for text in (plotly, (ASSETS / "report.js").read_text()):
        assert "</script" not in text.lower()
        assert "<!--" not in text
    assert "url(" not in (ASSETS / "report.css").read_text()


def test_the_same_runs_give_the_same_page() -> None:
    assert of(SSO, AVG) == of(SSO, AVG)


def test_without_javascript_the_table_is_there() -> None:
    outline = Outline(of(SSO, AVG))
    assert len(outline.all("tr")) == 3
    assert len(outline.all("noscript")) == 1
    assert outline.all("section").count({"id": "curves", "hidden": None}) == 1


def big() -> Content:
    """84 settings of 200 rounds, every column full of numbers; the largest steps diverge."""
    draw = np.random.default_rng(0)

    def rows(rate: float, end: int) -> Iterator[dict[str, float]]:
        names = (
            "train_loss",
            "test_loss",
            "test_accuracy",
            "grad_norm",
            "ys",
            "radius",
            "alpha",
            "seconds",
        )
        for k in range(201):
            row = dict(zip(names, draw.random(len(names)).tolist(), strict=True))
            counts = dict(
                zip(("overridden", "skipped"), draw.integers(2, size=2).tolist(), strict=True)
            )
            counts["bytes_up"] = int(draw.integers(10**9))
            row["test_accuracy"] = (
                0.94 * (1 - math.exp(-rate * k)) + 0.02 * row["test_accuracy"]
            ) * (k < end)
            row["train_loss"] = 2 * math.exp(-rate * k / 3) + 0.05 * row["train_loss"]
            yield {"trial": 0, "seed": 0, "round": k, "bytes_down": 5, **counts, **row}

    def entry(a: float, e: float) -> Entry:
        lost = a * e > 0.2
        made = list(rows((a * e) ** 0.5 * (0.01 if lost else 1), 60 if lost else 999))
        own = Trace.from_rows(made, diverged=60 if lost else None)
        return Entry(
            Curve(f"fedsso alpha={a:.3g} eta={e:.3g}", (own,), "fedsso"), {"alpha": a, "eta": e}
        )

    grid = product(np.geomspace(1e-4, 0.7, 12).tolist(), np.geomspace(0.01, 1, 7).tolist())
    return Content([entry(a, e) for a, e in grid], "A sweep of 84 trials")


def test_a_sweep_of_84_trials_stays_below_4_megabytes() -> None:
    html = page(big())
    assert len(html.encode()) < 4_000_000
    assert sum(len(t["columns"]) for c in embedded(html)["curves"] for t in c["traces"]) == 84 * 12


# ---- where runs come from ----


@pytest.fixture(scope="module")
def fed() -> fedsso.Federation:
    return fedsso.load("digits", clients=4, seed=0)


@pytest.fixture(scope="module")
def runs(fed: fedsso.Federation) -> fedsso.Results:
    algorithms = [fedsso.FedSSO(alpha=0.1), fedsso.FedAvg(alpha=0.1)]
    return fedsso.compare(fed, "mclr", algorithms, rounds=4, seeds=(0, 1), device="cpu")


def command(*args: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(map(str, args)), env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def same(curve: Curve, traces: list[Trace]) -> None:
    assert len(curve.traces) == len(traces)
    for own, other in zip(curve.traces, traces, strict=True):
        np.testing.assert_array_equal(own["test_accuracy"], other["test_accuracy"])


def test_a_folder_of_runs(runs: fedsso.Results, fed: fedsso.Federation, tmp_path: Path) -> None:
    runs.save(tmp_path)
    found = content([tmp_path])
    assert [curve.label for curve in found.curves] == ["fedsso alpha=0.1", "fedavg alpha=0.1"]
    for curve, own in zip(found.curves, runs.curves(), strict=True):
        same(curve, list(own.traces))
    assert found.notes == []
    (held,) = found.holdings
    np.testing.assert_array_equal(held.counts, fed.label_counts().numpy())
    first = found.recipes[0]
    assert first.command == "fedsso run --config spec.toml --seeds 0,1"
    assert "[fedsso]\nalpha = 0.1" in first.text
    (one,) = content([tmp_path / runs[1].spec.folder(1)]).curves
    same(one, [runs[1].trace])
    (again,) = content([tmp_path / runs[1].spec.folder(1) / "trace.csv"]).curves
    assert again.label == one.label


def test_the_command_repeats_the_run(
    runs: fedsso.Results, tmp_path: Path, monkeypatch: Any
) -> None:
    runs.save(tmp_path / "a")
    told = content([tmp_path / "a"])
    assert "Save the settings below as spec.toml, then:" in page(told)
    monkeypatch.chdir(tmp_path)
    Path("spec.toml").write_text(told.recipes[1].text, encoding="utf-8")
    command(*told.recipes[1].command.split()[1:], "--out", tmp_path / "b")
    ours = [run.final() for run in runs if run.spec.algorithm == "fedavg"]
    assert [run.final() for run in fedsso.load_runs(tmp_path / "b")] == ours


def test_what_no_file_can_hold_has_no_command(fed: fedsso.Federation, tmp_path: Path) -> None:
    def f1(outputs: Any, targets: Any) -> Any:
        return (outputs.argmax(-1) == targets).float().mean()

    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    short: dict[str, Any] = {"rounds": 1, "device": "cpu"}
    for i, (run, said) in enumerate(
        (
            (fedsso.simulate(fed, net, "fedavg", **short), "holds a module of one&#x27;s own"),
            (fedsso.simulate(fed, "mclr", "fedavg", metrics=[f1], **short), "holds metrics of"),
            (fedsso.simulate(own_data(), "mclr", "fedavg", **short), "holds data of"),
        )
    ):
        run.save(tmp_path / str(i))
        html = page(content([tmp_path / str(i)]))
        assert "fedsso run --config" not in html
        assert f"No command repeats this, because no file {said}" in html
        assert "algorithm = &quot;fedavg&quot;" in html


@hyper
class Mine(fedsso.FedAvg):
    """FedAvg under a name of one's own."""


def test_an_algorithm_that_is_not_registered_is_shown_all_the_same(
    fed: fedsso.Federation, tmp_path: Path
) -> None:
    """Whoever gets the folder has not the class; everything but training again is there."""
    with patch.dict(ALGORITHMS, {"mine": Mine}):
        runs = fedsso.compare(
            fed, "mclr", [Mine(alpha=0.2), "fedsso"], rounds=3, device="cpu", out=tmp_path
        )
    found = content([tmp_path])
    assert [curve.label for curve in found.curves] == [run.label for run in runs]
    same(found.curves[0], [runs[0].trace])
    html = page(found)
    mine, sso = embedded(html)["curves"]
    assert mine["color"] in OWN
    assert sso["color"] == style("fedsso").color
    assert "no file holds an algorithm of one&#x27;s own" in html
    assert "[mine]\nalpha = 0.2" in found.recipes[0].text
    loaded = fedsso.load_runs(tmp_path)
    assert loaded[0].final() == runs[0].final()
    assert torch.equal(loaded[0].x, runs[0].x)
    with pytest.raises(InputError, match=r"mine is not registered.*ALGORITHMS\['mine'\]"):
        _ = loaded[0].record


def test_the_command_writes_the_first_table_of_the_page(
    runs: fedsso.Results, tmp_path: Path, monkeypatch: Any
) -> None:
    runs.save(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    wished = ("report", "runs", "--targets", "0.5", "--tables", "t.tex,t.md,t.csv")
    command(*wished)
    ours = runs.table([0.5])
    assert Path("t.tex").read_text(encoding="utf-8") == ours.to_latex()
    assert Path("t.md").read_text(encoding="utf-8") == ours.to_markdown()
    assert Path("t.csv").read_text(encoding="utf-8") == ours.to_csv()
    command(*wished)  # our own tables are replaced
    Path("t.tex").write_text("mine", encoding="utf-8")
    assert "t.tex already exists and is not a table" in command(*wished, code=2).stderr
    told = command("report", "runs", "--tables", "t.xls", code=2).stderr
    assert "unknown format of a table '.xls'" in told
    assert Path("t.tex").read_text(encoding="utf-8") == "mine"


# ---- client by client ----


def by_client(html: str) -> list[list[str]]:
    """The cells of the table of clients, line by line, its head first."""
    (part,) = re.findall(r'<section id="clients">(.*?)</section>', html, re.S)
    lines = re.findall(r"<tr>(.*?)</tr>", part, re.S)
    cell = re.compile(r"<t[hd][^>]*>(?:<button[^>]*>)?(?:<svg.*?</svg>)?([^<]*)")
    return [cell.findall(line) for line in lines]


def test_the_table_of_clients_is_that_of_the_runs(
    runs: fedsso.Results, fed: fedsso.Federation, tmp_path: Path
) -> None:
    """In memory and from a folder; the mean over the seeds."""
    runs.save(tmp_path / "runs")
    runs.report(tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    head, *lines = by_client(html)
    settings = runs.settings()
    assert head == ["client", "training rows", "test rows", *(one.label for one in settings)]
    tables = [[run.clients() for run in one.runs] for one in settings]
    assert len(lines) == fed.clients
    for i, line in enumerate(lines):
        assert line[:3] == [str(i), f"{fed.train_sizes[i]}", f"{fed.test_sizes[i]}"]
        means = [np.mean([table["accuracy"][i] for table in own]) for own in tables]
        assert line[3:] == [f"{mean:.4f}" for mean in means]
    assert by_client(page(content([tmp_path / "runs"]))) == [head, *lines]


def test_models_that_do_not_fit_their_data_are_in_no_table_of_clients(
    runs: fedsso.Results,
) -> None:
    """A curve without models has no column; one whose model is another says why."""

    def refuse() -> Served:
        raise InputError("its model is another")

    served = Served(["a", "b"], [3, 5], [1, 0], "accuracy", [0.5, math.nan])
    entries = [Entry(SSO, by_client=lambda: served), Entry(AVG, by_client=refuse), Entry(LOST)]
    html = page(Content(entries, targets=[0.5]))
    assert by_client(html)[1:] == [["a", "3", "1", "0.5000"], ["b", "5", "0", "–"]]
    assert "FedAvg is not shown: its model is another." in html
    assert 'id="clients"' not in page(Content([Entry(LOST)], targets=[0.5]))
    run = replace(runs[0], trace=replace(runs[0].trace, columns=wrong(runs[0].trace)))
    assert run.live is not None
    with pytest.raises(InputError, match="in its trace"):
        report_by_client([run], run.live.fed)


def wrong(trace: Trace) -> dict[str, Any]:
    """The columns of a trace whose accuracies are too high."""
    return {**trace.columns, "test_accuracy": trace["test_accuracy"] + 0.1}


def test_too_many_clients_have_no_table(runs: fedsso.Results) -> None:
    many = fedsso.load("digits", clients=201, partition="iid", min_rows=1)
    with pytest.raises(InputError, match="201 clients are too many for a table"):
        report_by_client(runs, many)


def test_python_and_the_command_write_the_same_curves(
    runs: fedsso.Results, tmp_path: Path, monkeypatch: Any
) -> None:
    runs.save(tmp_path / "runs")
    runs.report(tmp_path / "python.html", title="Mine", text="One.\n\nTwo.", targets=[0.5])
    monkeypatch.chdir(tmp_path)
    told = command("report", "runs", "--targets", "0.5", "--title", "Mine")
    assert told.stdout.startswith("report.html: 4 runs, ")
    ours, theirs = (
        (tmp_path / name).read_text(encoding="utf-8") for name in ("python.html", "report.html")
    )
    assert embedded(ours) == embedded(theirs)
    assert "<p>One.</p>\n<p>Two.</p>" in ours
    command("report", "runs", "--out", "report.html")  # a page is replaced


def test_an_unfinished_run_is_shown_as_far_as_it_goes(
    fed: fedsso.Federation, tmp_path: Path
) -> None:
    class Stop(Exception):
        pass

    def stop(_: str, k: int, *__: object) -> None:
        if k == 7:
            raise Stop

    out = tmp_path / "half"
    options: dict[str, Any] = {"out": out, "checkpoint_every": 3, "progress": stop}
    with pytest.raises(Stop):
        fedsso.simulate(fed, "mclr", fedsso.FedAvg(alpha=0.1), rounds=9, device="cpu", **options)
    found = content([out])
    assert found.curves[0].traces[0]["round"].tolist() == list(
        range(7)
    )  # the last checkpoint was after round 6
    (note,) = found.notes
    assert note == f"{out} is not finished: 6 of 9 rounds; `fedsso resume {out}` completes it."
    (out / "trace.csv").unlink()
    (out / "checkpoint.safetensors").unlink()
    with pytest.raises(InputError, match="has a round to show"):
        content([out])


def test_runs_of_one_label_that_are_not_alike_are_told_apart(
    fed: fedsso.Federation, tmp_path: Path
) -> None:
    for rounds in (2, 3):
        fedsso.simulate(fed, "mclr", fedsso.FedAvg(alpha=0.1), rounds=rounds, device="cpu").save(
            tmp_path / str(rounds)
        )
    found = content([tmp_path])
    assert [curve.label for curve in found.curves] == [
        "fedavg alpha=0.1 rounds=2",
        "fedavg alpha=0.1 rounds=3",
    ]
    both = content([tmp_path / "2", tmp_path / "3"])
    assert [c.label for c in both.curves] == [
        f"fedavg alpha=0.1 ({tmp_path.name}/{n})" for n in (2, 3)
    ]
    assert [one.title for one in both.recipes] == [c.label for c in both.curves]
    assert "rounds = 3" in both.recipes[1].text


CARD = r"<h3>(.*?)</h3>"


def table_of(folder: Path) -> Path:
    """Two clients with twelve rows each."""
    folder.mkdir(parents=True)
    for name in ("a", "b"):
        (folder / f"{name}.csv").write_text(
            "x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(12)), encoding="utf-8"
        )
    return folder


def test_runs_of_different_data_are_no_contest(fed: fedsso.Federation, tmp_path: Path) -> None:
    """Whether they lie in one folder or in two; those of one federation still are."""
    table = fedsso.load("csv", files=str(table_of(tmp_path / "table")), target="y")
    for name, own in (("a", fed), ("b", table)):
        fedsso.simulate(own, "mclr", fedsso.FedAvg(alpha=0.1), rounds=2, device="cpu").save(
            tmp_path / "runs" / name
        )
    note = "These runs are of different data: digits; table. Numbers compare within one."
    for paths in ([tmp_path / "runs"], [tmp_path / "runs" / "a", tmp_path / "runs" / "b"]):
        found = content(paths)
        assert [curve.label for curve in found.curves] == [
            "fedavg alpha=0.1 on digits",
            "fedavg alpha=0.1 on table",
        ]
        assert [one.title for one in found.recipes] == [curve.label for curve in found.curves]
        assert found.notes[0] == note
        html = page(found)
        assert re.findall(CARD, html) == ["Diverged"]
        assert 'class="best"' not in html
        assert f"<li>{note}</li>" in html
    fedsso.simulate(fed, "mclr", fedsso.FedSSO(alpha=0.1), rounds=2, device="cpu").save(
        tmp_path / "c"
    )
    one = content([tmp_path / "runs" / "a", tmp_path / "c"])
    assert one.notes == []
    assert "Best final accuracy" in re.findall(CARD, page(one))
    assert 'class="best"' in page(one)


def test_a_data_set_split_in_two_ways_is_named_with_the_difference(
    fed: fedsso.Federation, tmp_path: Path
) -> None:
    for own in (fed, fedsso.load("digits", clients=5, seed=0)):
        run = fedsso.simulate(own, "mclr", fedsso.FedAvg(alpha=0.1), rounds=1, device="cpu")
        run.save(tmp_path / str(own.clients))
    AVG.traces[0].save(tmp_path / "bare" / "trace.csv")
    note = content([tmp_path]).notes[0]
    assert ": digits clients=4; digits clients=5; unknown data." in note


def test_of_different_data_each_has_its_best() -> None:
    """Six settings of one algorithm on each of two federations: too many to be drawn at first."""
    one = [
        Entry(Curve(f"{d} {i}", (trace(0.1, 0.1 * i + 0.2),), "fedavg"), data=d)
        for d in "ab"
        for i in range(6)
    ]
    html = page(Content(one))
    assert [c["label"] for c in embedded(html)["curves"] if c["shown"]] == ["a 5", "b 5"]
    assert "Best setting of each algorithm on each data set" in html


def test_folders_of_runs_below_a_folder_are_found(
    runs: fedsso.Results, fed: fedsso.Federation, tmp_path: Path
) -> None:
    """A run, a comparison, a sweep and one that has not begun, side by side."""
    fedsso.simulate(fed, "mclr", fedsso.FedProx(alpha=0.1), rounds=1, device="cpu").save(
        tmp_path / "one"
    )
    runs.save(tmp_path / "several")
    words = (
        "--algorithms",
        "scaffold",
        "--alpha",
        "0.1",
        "--clients",
        4,
        "--rounds",
        1,
        "--device",
        "cpu",
    )
    command("sweep", *words, "--out", tmp_path / "sweep")
    (tmp_path / "begun" / "parts").mkdir(parents=True)
    found = content([tmp_path])
    assert {curve.algorithm for curve in found.curves} == {
        "fedprox",
        "fedsso",
        "fedavg",
        "scaffold",
    }
    assert sum(len(curve.traces) for curve in found.curves) == 1 + 4 + 1
    (note,) = found.notes  # the sweep's federation is that of the runs
    assert note.startswith(f"{tmp_path / 'begun'} is left out: ")


def test_the_same_folder_given_twice_counts_once(runs: fedsso.Results, tmp_path: Path) -> None:
    runs.save(tmp_path / "a")
    once, twice = (
        content([tmp_path / "a"]),
        content([tmp_path / "a", tmp_path / "a" / ".." / "a", tmp_path]),
    )
    assert [c.label for c in twice.curves] == [c.label for c in once.curves]
    assert len(twice.recipes) == len(once.recipes)
    among = content(
        [tmp_path / "a" / runs[0].spec.folder(0), tmp_path / "a"]
    )  # a run, and the folder that holds it
    assert [len(c.traces) for c in among.curves] == [2, 2]


def test_data_that_are_gone_leave_a_sentence(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text(
            "x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(12)), encoding="utf-8"
        )
    table = fedsso.load("csv", files=str(tmp_path), target="y")
    fedsso.simulate(table, "mclr", fedsso.FedAvg(alpha=0.1), rounds=2, device="cpu").save(
        tmp_path / "run"
    )
    assert content([tmp_path / "run"], with_data=True).holdings[0].counts.tolist() == [
        [6, 6],
        [6, 6],
    ]
    (tmp_path / "a.csv").unlink()
    found = content([tmp_path / "run"], with_data=True)
    assert found.holdings == []
    (note,) = found.notes
    assert note.startswith("The data per client are not shown: ")


GRID = ("--algorithms", "fedsso,fedavg", "--alpha", "0.03,0.3", "--eta", "0.3,1")
SWEEP = ("--clients", 3, "--rounds", 6, "--device", "cpu", *GRID)


def test_a_sweep(tmp_path: Path) -> None:
    out = tmp_path / "s"
    command("sweep", *SWEEP, "--seeds", "0,1", "--out", out)
    found = content([out])
    labels = [
        f"fedsso alpha={a}{e}" for a in (0.03, 0.3) for e in (" eta=0.3", "")
    ]  # eta is 1 by default
    assert [curve.label for curve in found.curves[:4]] == labels
    fed = fedsso.load("digits", clients=3, seed=0)
    record = fedsso.FedSSO(alpha=0.3, eta=0.3)
    again = fedsso.compare(fed, "mclr", [record], rounds=6, seeds=(0, 1), device="cpu")
    for own, other in zip(found.curves[2].traces, again, strict=True):
        np.testing.assert_allclose(
            own["test_accuracy"], other.trace["test_accuracy"], atol=5e-3
        )  # batched sums differ
    maps = embedded(page(found))["maps"]
    assert [m["cells"] for m in maps] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    (recipe,) = found.recipes
    assert recipe.command == "fedsso sweep --config sweep.toml"
    assert "Save the settings below as sweep.toml, then:" in page(found)
    assert recipe.text in (out / "sweep.toml").read_text(encoding="utf-8")
    assert found.holdings[0].counts.shape == (3, 10)
    shutil.copytree(out, tmp_path / "t")
    two = content([out, tmp_path / "t"])
    assert {e.origin for e in two.entries} == {f"({tmp_path.name}/{name})" for name in "st"}


@pytest.mark.sample
@pytest.mark.parametrize("target", [None, 0.5, 0.8, 1.0])
def test_the_winners_are_those_of_the_sweeps_table(target: float | None, tmp_path: Path) -> None:
    """Twelve settings: the page shows the best of each algorithm first. Nobody reaches 1."""
    grid = ("--algorithms", "fedsso,fedavg", "--alpha", "0.01,0.1,0.7", "--eta", "0.1,1")
    wish = () if target is None else ("--target", target)
    small = ("--clients", 3, "--rounds", 12, "--device", "cpu", "--seeds", "0,1")
    command("sweep", *small, *grid, *wish, "--out", tmp_path, code=1 if target == 1 else 0)
    rows = [
        line.split(" | ")
        for line in (tmp_path / "table.md").read_text(encoding="utf-8").splitlines()[2:4]
    ]
    html = page(content([tmp_path]))
    data, outline = embedded(html), Outline(html)
    labels = [cell["data-value"] or "" for cell in outline.all("th") if cell["scope"] == "row"][:2]
    for label, row in zip(labels, rows, strict=True):
        name, *said = label.split(" ")
        assert name == row[0].strip("| ")
        assert set(said) <= set(row[1].split(" "))
        assert set(row[1].split(" ")) - set(said) <= {
            "eta=1"
        }  # at its default, which labels leave out
    width = (
        len(outline.parts["button"]) // 2 - 1
    )  # of two tables with the same headings, without the labels
    cells = [outline.parts["td"][i * width : (i + 1) * width] for i in range(2)]
    assert [own[-1] for own in cells] == [row[-2] for row in rows]  # the final accuracies
    if target is not None:
        column = outline.parts["button"].index(f"rounds to {target:.2f}") - 1
        assert [own[column] for own in cells] == [row[2] for row in rows]
    if target == 1:  # the maps show rounds to what is reached, and are not empty
        assert any(curve["rounds"][int(data["judged"])] for curve in data["curves"])
    if target in (0.5, 0.8):
        assert data["targets"][int(data["judged"])] == target  # the maps' as well
        assert f"Fewest rounds to {target:g}" in outline.parts["h3"]


def test_losses_are_ranked_at_the_end_as_sweeps_do() -> None:
    """The mean of the last quarter: the last evaluation alone goes up and down."""

    def curve(label: str, *losses: float) -> Entry:
        same = {"trial": 0, "seed": 0, "overridden": 0, "skipped": 0, "bytes_up": 0}
        rows = [
            {**same, "bytes_down": 0, "round": k, "test_loss": loss}
            for k, loss in enumerate(losses)
        ]
        return Entry(Curve(label, (Trace.from_rows(rows),), "fedavg"))

    lucky, steady = curve("lucky", *[5.0] * 7, 0.5), curve("steady", *[1.0] * 8)
    view = View(Content([lucky, steady]))
    assert [item.end for item in view.items] == [2.75, 1.0]
    assert [item.label for item in view.best(view.front)] == ["steady"]


@pytest.mark.parametrize("target", [None, 0.6])
def test_the_goal_of_a_sweep_made_from_python_is_its_target(
    target: float | None, tmp_path: Path
) -> None:
    fed = fedsso.load("digits", clients=3)
    grid = fedsso.grid("fedavg", {"alpha": [0.1, 0.3]})
    fedsso.sweep(fed, "mclr", grid, rounds=3, target=target, out=tmp_path, device="cpu")
    found = content([tmp_path])
    assert found.goal == (math.inf if target is None else target)
    data = embedded(page(found))
    if target is not None:
        assert data["targets"][int(data["judged"])] == target
    (tmp_path / "trials.csv").unlink()  # it is written last
    assert content([tmp_path]).goal is None


def test_a_sweep_chosen_by_held_out_rows_leads_with_the_test_rows(tmp_path: Path) -> None:
    command("sweep", *SWEEP, "--select", "val", "--out", tmp_path)
    found = content([tmp_path])
    assert len(found.curves) == 2 + 8
    leads = [e for e in found.entries if e.lead]
    assert [e.curve.algorithm for e in leads] == ["fedsso", "fedavg"]
    assert not [e for e in leads if "held-out" in e.curve.label]
    assert all(e.curve.label.endswith(" on held-out rows") for e in found.entries if not e.lead)
    assert "held-out" in found.notes[0]
    table = (tmp_path / "table.md").read_text(encoding="utf-8").splitlines()[2:4]
    for row, lead in zip(table, leads, strict=True):
        said = float(row.split("|")[3])  # of six rounds the last evaluation alone is the end
        assert lead.curve.traces[0].final() == pytest.approx(said, abs=5e-5)


def test_a_sweep_in_memory_has_the_page_of_its_winners(
    fed: fedsso.Federation, tmp_path: Path
) -> None:
    """Twelve settings, so that the best of each algorithm is drawn first."""
    grid = []
    for name in ("fedsso", "fedavg"):
        grid += fedsso.grid(name, {"alpha": [0.01, 0.03, 0.3], "eta": [0.3, 1.0]})
    for target, select in ((0.7, "val"), (0.7, "test"), (None, "test")):
        many = fedsso.sweep(fed, "mclr", grid, rounds=6, target=target, select=select, device="cpu")
        many.report(tmp_path / "page.html")
        html = (tmp_path / "page.html").read_text(encoding="utf-8")
        shown = [curve["label"] for curve in embedded(html)["curves"] if curve["shown"]]
        assert shown == [best.label for best in many.winners().values()]
        best = max(setting.final() for setting in many.winners().values())
        assert f'<h3>Best final accuracy</h3><p class="value">{best:.4f}</p>' in html
        assert ("Settings were chosen by held-out training rows" in html) == (select == "val")
        assert "Fewest rounds to 0.7<" in html or target is None
        recipes = 2 if select == "val" else 12
        assert html.count("fedsso run --config") == recipes


def test_what_was_judged_by_held_out_rows_says_so_before_the_sweep_is_finished(
    tmp_path: Path,
) -> None:
    command("sweep", *SWEEP, "--select", "val", "--out", tmp_path)
    (tmp_path / "trials.csv").unlink()  # it is written last
    found = content([tmp_path])
    for entry in found.entries:
        assert entry.curve.label.endswith(" on held-out rows") != entry.lead
    assert any("not finished" in note for note in found.notes)


def test_another_sweeps_trials_in_the_folder_are_not_mixed_in(tmp_path: Path) -> None:
    command("sweep", *SWEEP, "--out", tmp_path)
    command("sweep", *SWEEP, "--rounds", 4, "--out", tmp_path)
    found = content([tmp_path])
    assert {len(curve.traces[0]) for curve in found.curves} == {5}
    assert "8 more trials" in found.notes[0]
    (tmp_path / "trials.csv").unlink()
    unfinished = content([tmp_path])
    (note,) = unfinished.notes
    assert note.endswith(": run the same `fedsso sweep` command again to complete it.")
    labels = [curve.label for curve in unfinished.curves]
    assert len(set(labels)) == 16, "they are told apart"
    assert sum("rounds=4" in label for label in labels) == 8
    shutil.move(tmp_path / "parts", tmp_path / "own")  # parts alone
    assert len(content([tmp_path / "own"]).curves) == 16


def own_data() -> fedsso.Federation:
    """Three clients with two labels, as arrays."""
    draw = np.random.default_rng(0)
    rows = [(draw.random((20, 3)), np.arange(20) % 2) for _ in range(3)]
    return fedsso.Federation.from_clients(rows)


@pytest.mark.parametrize("select", ["test", "val"])
def test_the_data_of_a_sweep_are_those_of_its_runs(select: str, tmp_path: Path) -> None:
    """Also in a folder in which a sweep of other data has left its settings."""
    command("sweep", *SWEEP, "--out", tmp_path)
    fed = own_data()
    fedsso.sweep(fed, "mclr", ["fedavg"], rounds=6, select=select, out=tmp_path, device="cpu")
    found = content([tmp_path])
    assert {entry.data for entry in found.entries} == {"own arrays"}
    assert found.holdings == []
    assert found.recipes == []
    assert any("arrays of your own" in note for note in found.notes)


def test_an_unfinished_sweep_from_python_says_so(fed: fedsso.Federation, tmp_path: Path) -> None:
    fedsso.sweep(fed, "mclr", [fedsso.FedAvg()], rounds=2, out=tmp_path, device="cpu")
    assert content([tmp_path]).notes == []
    (tmp_path / "trials.csv").unlink()  # it is written last
    (note,) = content([tmp_path]).notes
    assert "is not finished" in note
    assert note.endswith(": call `fedsso.sweep` with the same arguments again to complete it.")
    assert content([tmp_path / "parts"]).notes == []


def test_a_run_on_flower(tmp_path: Path) -> None:
    if importlib.util.find_spec("flwr") is None:
        pytest.skip("needs flwr")
    code = (
        "import warnings; warnings.simplefilter('ignore');"
        "from clients import federation, initial; from fedsso.flower import FedSSO;"
        f"s = FedSSO(eta_l=0.1, local_steps=3, checkpoint_dir={str(tmp_path / 'srv')!r});"
        "s.start(federation(), initial(), num_rounds=3)"
    )
    paths = os.pathsep.join([str(HERE / "flower"), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    found = content([tmp_path / "srv"])
    (curve,) = found.curves
    assert (curve.label, curve.algorithm) == ("fedsso on Flower", "fedsso")
    assert curve.traces[0]["round"].tolist() == [0, 1, 2, 3]
    assert "FedSSO(alpha=0.1" in found.recipes[0].text
    page(found)


def test_a_bare_trace(tmp_path: Path) -> None:
    same = {"trial": 0, "seed": 0, "overridden": 0, "skipped": 0, "bytes_up": 0, "bytes_down": 0}
    rows = [{**same, "round": k, "test_accuracy": k / 10 if k % 3 == 0 else NAN} for k in range(8)]
    Trace.from_rows(rows).save(tmp_path / "fedavg-home" / "trace.csv")
    (curve,) = content([tmp_path / "fedavg-home"]).curves
    assert (curve.label, curve.algorithm) == (f"{tmp_path.name}/fedavg-home", "fedavg")
    assert curve.traces[0].eval_every == 3
    (other,) = content([tmp_path / "fedavg-home" / "trace.csv"]).curves
    assert other.label == curve.label


@pytest.mark.parametrize("eval_every", [1, 3])
def test_a_bare_trace_without_an_accuracy_tells_where_it_diverged(
    eval_every: int, quad: fedsso.Federation, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"rounds": 11, "eval_every": eval_every, "device": "cpu"}
    for alpha in (0.1, 50.0):
        run = fedsso.simulate(quad, "linear", fedsso.FedAvg(alpha=alpha), **options)
        run.trace.save(tmp_path / "trace.csv")
        (found,) = content([tmp_path / "trace.csv"]).curves[0].traces
        if run.diverged is None:
            assert found.diverged is None
        else:
            assert found.diverged in (run.diverged, run.diverged + 1)
    assert run.diverged is not None


def test_several_inputs_are_shown_together(runs: fedsso.Results, tmp_path: Path) -> None:
    runs.save(tmp_path / "a")
    AVG.traces[0].save(tmp_path / "b" / "trace.csv")
    assert len(content([tmp_path / "a", tmp_path / "b"]).curves) == 3


def test_wrong_paths_name_the_remedy(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "absent", "there is no"), (tmp_path, "holds nothing to report")):
        told = command("report", path, "--out", tmp_path / "r.html", code=2)
        assert said in told.stderr
        assert "give a run's folder" in " ".join(told.stderr.split())
    (tmp_path / "notes.txt").write_text("hello", encoding="utf-8")
    told = " ".join(command("report", tmp_path / "notes.txt", code=2).stderr.split())
    assert "as a trace" in told
    assert "give a run's folder" in told
    AVG.traces[0].save(tmp_path / "trace.csv")
    assert "got 90" in command("report", tmp_path / "trace.csv", "--targets", "90", code=2).stderr
    (tmp_path / "parts").mkdir()
    assert "no finished trial" in command("report", tmp_path, code=2).stderr
    assert not (tmp_path / "r.html").exists()
    with pytest.raises(InputError, match="at least one"):
        page(Content([]))
