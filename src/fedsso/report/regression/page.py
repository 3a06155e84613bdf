"""The page of a regression: one HTML file without scripts, which needs no network.

Names of columns, levels and hospitals come from others: they are escaped wherever they stand, and
the page's content policy lets no script run and nothing be fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from ...regression.outcome import BINOMIAL, COX, GAUSSIAN, POISSON
from ...regression.result import printed
from ...support.files import write_atomic
from ...support.intake import read_text
from ...version import __version__
from ..page.document import ASSETS, document, filled
from ..page.sections import notes as noted
from .charts import COLOURS, calibration, convergence, look, roc
from .steps import Axis, Step, axis_of, shown, steps

if TYPE_CHECKING:
    from ...regression.result import Regression

LEVEL = 0.95
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
EXPECTED = {
    BINOMIAL: "share of events",
    GAUSSIAN: "mean",
    POISSON: "mean count",
    COX: "number of events",
}
"""What the groups of a calibration curve have, by the family."""
MEANINGS = {
    "auc": "AUC: how often a patient with the event has the higher prediction (0.5 is chance).",
    "brier": "Brier score: mean squared error of the probabilities.",
    "concordance": "Concordance: how often the earlier event had the higher risk (0.5 is chance).",
    "slope": "Calibration slope: 1 where predictions are as extreme as they should be.",
    "intercept": "Calibration intercept, at slope 1: above 0 where predictions are too low.",
}


def write(path: str | Path, result: Regression, title: str = "") -> None:
    """Write the page to a file; a file that lies there is replaced."""
    write_atomic(path, page(result, title))


def page(result: Regression, title: str = "") -> str:
    """The whole page as text. The same result gives the same page, byte by byte."""
    head = {
        "policy": POLICY,
        "title": title or printed.title_of(result),
        "about": _about(result),
    }
    parts = {
        "style": read_text(ASSETS / "report.css") + read_text(ASSETS / "regression.css"),
        "notes": noted(result.notes),
        "cards": "\n".join(_cards(result)),
        "scripts": "",
    }
    body = {
        "forest": _forest(result),
        "coefficients": _coefficients(result),
        "predictions": _predictions(result),
        "hospitals": _hospitals(result),
        "texts": _texts(result),
        "convergence": _convergence(result),
    }
    return document(head, parts, filled("regression.html", body))


# ---- the head ----


def _about(result: Regression) -> str:
    """How the fit was made, in one line."""
    fit = result.fit
    errors = "standard errors from the information of all hospitals"
    if fit.robust is not None:
        errors = "standard errors clustered by hospital"
    parts = [
        f"{result.family.name} family, {result.family.link} link",
        f"log-likelihood {fit.loglik:.2f}",
        f"AIC {fit.aic:.2f}",
        errors,
        f"fedsso {__version__}",
    ]
    return " · ".join(parts)


def _cards(result: Regression) -> list[str]:
    """Rows, hospitals, how well it predicts, and what it cost."""
    fit = result.fit
    told = []
    if isfinite(fit.events):
        told.append(f"{fit.events:,.0f} events")
    told.append(
        f"{fit.dropped:,} left out because of missing values" if fit.dropped else "none left out"
    )
    cards = [_card("Rows", f"{fit.rows:,}", "; ".join(told))]
    refused = len(fit.refusals)
    said = f"{refused} excluded" if refused else "all took part"
    cards.append(_card("Hospitals", str(len(fit.hospitals)), said))
    for name, title in (("auc", "AUC"), ("concordance", "Concordance"), ("r_squared", "R²")):
        values = [getattr(one, name) for one in fit.hospitals]
        known = [value for value in values if isfinite(value)]
        if known:
            span = f"{min(known):.2f} – {max(known):.2f}"
            cards.append(_card(title, span, "from hospital to hospital"))
    up = printed.size_text(fit.bytes_up)
    down = printed.size_text(fit.bytes_down)
    ended = "converged" if fit.converged else "not converged"
    cards.append(_card("Rounds", str(fit.rounds), f"{ended}; {up} up, {down} down in all"))
    return cards


def _card(title: str, value: str, text: str) -> str:
    """A number with its sentence."""
    return (
        f'<div class="card"><h3>{escape(title)}</h3><p class="value">{escape(value)}</p>'
        f"<p>{escape(text)}</p></div>"
    )


# ---- coefficients ----


def _forest(result: Regression) -> str:
    """The forest plot, a line for each step; "" if there is nothing to draw."""
    lines = steps(result, LEVEL)
    if not lines:
        return ""
    ratio = result.family.ratio
    axis = axis_of(lines, bool(ratio))
    name = f"{ratio}s" if ratio else "differences of the outcome"
    hint = (
        f"{name.capitalize()} with {printed.percent(LEVEL)} intervals. Numbers are shown for a "
        f"round step near one standard deviation, so that they can be compared; the table has "
        f"them for one unit."
    )
    rows = "\n".join(_line(line, axis, bool(ratio)) for line in lines)
    # All lines leave the same room to their numbers, or the axis would not be the same.
    room = max(len(" ".join(_numbers(line, bool(ratio)))) for line in lines)
    return (
        f'<p class="hint">{escape(hint)}</p>\n'
        f'<div class="forest" style="--numbers:{room}ch" role="img" '
        f'aria-label="Forest plot: {escape(name)} of the table below">\n'
        f"{rows}\n{_axis(axis)}\n</div>"
    )


def _line(line: Step, axis: Axis, ratios: bool) -> str:
    """One step: its name, its interval on the axis, its numbers."""
    left = 100 * axis.share(line.low)
    wide = 100 * axis.share(line.high) - left
    cut = " cut" if line.high > axis.high else ""
    cut += " cut-left" if line.low < axis.low else ""
    grid = "".join(_rule(place, axis) for place, _ in axis.ticks)
    value, interval = _numbers(line, ratios)
    detail = f" <small>{escape(line.detail)}</small>" if line.detail else ""
    return (
        f'<div class="line"><div class="term">{escape(line.label)}{detail}</div>'
        f'<div class="track">{grid}'
        f'<span class="reach{cut}" style="left:{left:.2f}%;width:{wide:.2f}%"></span>'
        f'<span class="dot" style="left:{100 * axis.share(line.value):.2f}%"></span></div>'
        f'<div class="numbers">{value} <small>{interval}</small></div></div>'
    )


def _numbers(line: Step, ratios: bool) -> tuple[str, str]:
    """An estimate and its interval as text."""
    low = shown(line.low, ratios)
    high = shown(line.high, ratios)
    return shown(line.value, ratios), f"[{low}, {high}]"


def _rule(place: float, axis: Axis) -> str:
    """A vertical line at a tick; the one of no effect is darker."""
    none = " none" if abs(place) < 1e-12 else ""
    return f'<span class="at{none}" style="left:{100 * axis.share(place):.2f}%"></span>'


def _axis(axis: Axis) -> str:
    """The numbers below a forest plot."""
    marks = []
    for place, text in axis.ticks:
        marks.append(f'<span style="left:{100 * axis.share(place):.2f}%">{escape(text)}</span>')
    return (
        f'<div class="line axis"><div></div><div class="track">{"".join(marks)}</div>'
        f"<div></div></div>"
    )


def _coefficients(result: Regression) -> str:
    """The table of coefficients."""
    ratio = result.family.ratio
    interval = f"{printed.percent(LEVEL)} interval"
    heads = ["term", "unit", "estimate", "std. error", result.columns()[4], "p", interval]
    if ratio:
        heads += [ratio, interval]
    rows = []
    for row in result.rows(LEVEL):
        estimate, error, statistic, p, low, high, *ratios = printed.cells(row, bool(ratio))
        cells = [row.term, row.unit, estimate, error, statistic, p, f"{low} to {high}"]
        if ratio:
            cells += [ratios[0], f"{ratios[1]} to {ratios[2]}" if ratios[0] else ""]
        rows.append(cells)
    if not any(cells[1] for cells in rows):
        heads.pop(1)
        rows = [[cells[0], *cells[2:]] for cells in rows]
    return _table("Coefficients", heads, rows)


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is a heading of its row."""
    marks = {place: ' class="unit"' for place, head in enumerate(heads) if head == "unit"}
    head = ""
    for place, text in enumerate(heads):
        head += f'<th scope="col"{marks.get(place, "")}>{escape(text)}</th>'
    body = []
    for cells in rows:
        line = f'<th scope="row">{escape(cells[0])}</th>'
        for place, text in enumerate(cells[1:], 1):
            line += f"<td{marks.get(place, '')}>{escape(text)}</td>"
        body.append(f"<tr>{line}</tr>")
    joined = "\n".join(body)
    hint = '<p class="hint sideways">The table continues to the right: scroll sideways →</p>'
    return (
        f'{hint}<div class="table" tabindex="0" role="region" aria-label="{escape(title)}"><table>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{joined}\n</tbody></table></div>"
    )


# ---- hospitals ----


def _predictions(result: Regression) -> str:
    """Calibration and ROC curves; "" if no hospital has any."""
    every = result.assessments
    what = EXPECTED[result.family.name]
    panels = []
    drawn = calibration(every, what, lines=result.family.name != COX)
    if drawn:
        said = "Groups of patients with similar predictions; on the dashed line both agree."
        panels.append(_panel("Calibration", said, drawn))
    drawn = roc(every)
    if drawn:
        said = "Each point is a threshold of the predicted probability."
        panels.append(_panel("ROC", said, drawn))
    if not panels:
        return ""
    keys = []
    for number, one in enumerate(every[:COLOURS]):
        keys.append(f'<li class="{look(number, len(every))}">{escape(one.hospital)}</li>')
    if len(every) > COLOURS:
        keys.append(f'<li class="other">{len(every) - COLOURS} more</li>')
    return (
        f'<section id="predictions"><h2>Predictions</h2>\n<ul class="keys">{"".join(keys)}</ul>\n'
        f'<div class="panels">{"".join(panels)}</div></section>'
    )


def _panel(title: str, text: str, drawn: str) -> str:
    """A drawing with its title and a sentence."""
    return f'<div class="panel"><h3>{escape(title)}</h3><p>{escape(text)}</p>\n{drawn}</div>'


def _hospitals(result: Regression) -> str:
    """The table of the hospitals, and what its columns mean."""
    names = result.measures()
    heads = ["hospital", "rows", "dropped", *names.values()]
    rows = [printed.hospital_cells(one, list(names)) for one in result.assessments]
    said = " ".join(text for name, text in MEANINGS.items() if name in names)
    hint = f'<p class="hint">{escape(said)}</p>' if said else ""
    return hint + _table("Hospital by hospital", heads, rows)


# ---- the end ----


def _texts(result: Regression) -> str:
    """The summary as text, the table for LaTeX, and the schema, each folded up."""
    blocks = {
        "Summary as text": result.summary(LEVEL),
        "Coefficients for LaTeX": result.to_latex(level=LEVEL),
        "Schema of the tables (schema.toml)": result.fit.schema,
    }
    found = []
    for title, text in blocks.items():
        found.append(
            f"<details><summary>{escape(title)}</summary>"
            f'<pre class="text"><code>{escape(text)}</code></pre></details>'
        )
    return "\n".join(found)


def _convergence(result: Regression) -> str:
    """How the fit came to its end. What was settled in one step has no curve."""
    trace = result.fit.trace
    best = max((one.loglik for one in trace), default=0.0)
    likelihood = convergence(
        trace, "log-likelihood below its maximum", lambda one: best - one.loglik
    )
    gradient = convergence(trace, "length of the gradient", lambda one: one.gradient)
    panels = []
    if likelihood:
        panels.append(_panel("Log-likelihood", "How far it was below its maximum.", likelihood))
    if gradient:
        panels.append(_panel("Gradient", "On the common scale of all columns.", gradient))
    said = (
        f"{len(trace)} models were sent to all hospitals; the first one is the null model. The fit "
        f"ended {result.fit.distance:.1g} standard errors from the maximum."
    )
    return (
        f'<section id="convergence"><h2>Convergence</h2>\n<p class="hint">{escape(said)}</p>\n'
        f'<div class="panels">{"".join(panels)}</div></section>'
    )
