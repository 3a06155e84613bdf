"""The results of a regression as text: R's summary, CSV, LaTeX and a small HTML table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import floor, isfinite, isinf, log10
from typing import TYPE_CHECKING, Any

from ...support.files import to_csv
from ...support.latex import escaped, tabular
from ..design import INTERCEPT
from ..outcome import BINOMIAL, COX, GAUSSIAN, POISSON
from ..schema import CATEGORY, YESNO

if TYPE_CHECKING:
    from ..records import Assessment
    from .regression import Coefficient, Regression

TITLES = {
    BINOMIAL: "Logistic regression",
    GAUSSIAN: "Linear regression",
    POISSON: "Poisson regression",
    COX: "Cox regression",
}
TINY = 2.2e-16  # the precision of a p value
FIGURES = 4  # of a standard error; the estimate has as many decimals
BLANK = "."  # stands for a number that does not exist
UNITS = ("bytes", "kB", "MB", "GB")


# ---- numbers ----


def decimals(size: float, figures: int = FIGURES) -> int:
    """How many decimals show so many figures of a number of this size; 0 for large numbers.

    >>> decimals(0.0123), decimals(12.3)
    (5, 2)
    """
    if not isfinite(size) or not size:
        return figures
    return max(0, figures - 1 - floor(log10(abs(size))))


def rounded(value: float, places: int) -> str:
    """A number with so many decimals; very large and very small ones with a power of ten."""
    if isinf(value):
        return "Inf" if value > 0 else "-Inf"
    if not isfinite(value):
        return BLANK
    if abs(value) >= 1e6 or places > 9:
        return f"{value:.{FIGURES - 1}e}"
    return f"{value:.{places}f}"


def figures(value: float, count: int = FIGURES) -> str:
    """A number with so many figures.

    >>> figures(1.01234), figures(123.456), figures(0.000123456)
    ('1.012', '123.5', '0.0001235')
    """
    return rounded(value, decimals(value, count))


def p_text(p: float) -> str:
    """A p value as R writes it.

    >>> p_text(1e-30), p_text(0.00012), p_text(0.0432)
    ('<2e-16', '1.20e-04', '0.0432')
    """
    if not isfinite(p):
        return BLANK
    if p < TINY:
        return "<2e-16"
    return f"{p:.4f}" if p >= 0.001 else f"{p:.2e}"


def size_text(count: float) -> str:
    """A number of bytes in a unit that suits.

    >>> size_text(2250)
    '2.25 kB'
    """
    power = 0
    while count >= 1000 and power < len(UNITS) - 1:
        count /= 1000
        power += 1
    return f"{count:.3g} {UNITS[power]}"


def percent(level: float) -> str:
    """A level as text.

    >>> percent(0.95), percent(0.999)
    ('95 %', '99.9 %')
    """
    return f"{100 * level:.6g} %"


def cells(row: Coefficient, ratios: bool) -> list[str]:
    """A line of the table of coefficients as text, from the estimate on."""
    places = decimals(row.std_error)
    found = [
        rounded(row.estimate, places),
        rounded(row.std_error, places),
        rounded(row.statistic, 2),
        p_text(row.p),
        rounded(row.low, places),
        rounded(row.high, places),
    ]
    if ratios:
        found += [figures(row.ratio), figures(row.ratio_low), figures(row.ratio_high)]
    if row.term == INTERCEPT and ratios:
        found[-3:] = ["", "", ""]
    return found


def title_of(result: Regression) -> str:
    """What was done, in one line."""
    fit = result.fit
    schema = result.schema
    outcome = schema.outcome
    if schema.positive:
        outcome += f" ({schema.positive})"
    words = f"{TITLES[result.family.name]} of {outcome} over {counted(fit.hospitals, 'hospital')}"
    if result.family.name == COX:
        words += f", stratified by hospital, {fit.family.partition(' ')[2] or 'efron'} ties"
    return words


def counted(things: Sequence[object], word: str) -> str:
    """How many there are, with the word in its plural unless there is one."""
    many = len(things)
    return f"{many:,} {word}{'' if many == 1 else 's'}"


# ---- the summary ----


def summary_text(result: Regression, level: float) -> str:
    """The summary: coefficients, fit, hospitals, notes."""
    parts = [
        title_of(result),
        "\n".join(_rows_used(result)),
        "",
        *_coefficients(result, level),
        *references(result),
        "",
        *fit_lines(result),
        "",
        *_hospitals(result),
    ]
    if result.notes:
        parts.append("")
    parts += [f"Note: {note}" for note in result.notes]
    return "\n".join(parts) + "\n"


def _rows_used(result: Regression) -> Iterator[str]:
    """How many rows there are, with events and gaps."""
    fit = result.fit
    text = f"{fit.rows:,} rows"
    if isfinite(fit.events):
        text += f", {fit.events:,.0f} events"
    if fit.dropped:
        text += f"; {fit.dropped:,} more left out because of missing values"
    yield text


def _coefficients(result: Regression, level: float) -> list[str]:
    """The table of coefficients."""
    ratio = result.family.ratio
    heads = ["", "unit", "estimate", "std. error", result.columns()[4], "p"]
    heads += [f"[{percent(level)}", "interval]"]
    if ratio:
        heads += [ratio, f"[{percent(level)}", "interval]"]
    lines = [heads]
    for row in result.rows(level):
        lines.append([row.term, row.unit, *cells(row, bool(ratio))])
    if not any(line[1] for line in lines[1:]):
        lines = [[line[0], *line[2:]] for line in lines]
        return aligned(lines, 1)
    return aligned(lines, 2)


def references(result: Regression) -> list[str]:
    """With what the levels are compared, in a line; none where there are no levels."""
    used = {term.column for term in result.fit.terms if term.level}
    found = []
    for column in result.schema.columns:
        if column.name in used and column.type in (CATEGORY, YESNO):
            found.append(f"{column.name}: {column.baseline}")
    return [f"Reference levels: {', '.join(found)}"] if found else []


def fit_lines(result: Regression) -> list[str]:
    """Log-likelihood, deviance, AIC; which errors these are; rounds and bytes."""
    fit = result.fit
    told = [
        f"Log-likelihood {fit.loglik:.4f} (null model {fit.null_loglik:.4f}), AIC {fit.aic:.2f}",
    ]
    if result.family.name != COX:
        told.append(
            f"Deviance {fit.deviance:.4f} on {fit.residual_df:,} degrees of freedom (null model "
            f"{fit.null_deviance:.4f})"
        )
    if result.family.name == GAUSSIAN:
        told.append(f"Residual variance {figures(fit.dispersion, 6)}")
    kind = "the information of all hospitals"
    if fit.robust is not None:
        kind = "a sandwich, clustered by hospital"
    told.append(f"Standard errors from {kind}")
    ended = "Converged" if fit.converged else "NOT CONVERGED"
    up = size_text(fit.bytes_up)
    down = size_text(fit.bytes_down)
    told.append(
        f"{ended} after {fit.rounds} rounds; {up} up and {down} down, all hospitals together"
    )
    return told


def _hospitals(result: Regression) -> list[str]:
    """The table of the hospitals."""
    names = result.measures()
    lines = [["hospital", "rows", "dropped", *names.values()]]
    for one in result.assessments:
        lines.append(hospital_cells(one, list(names)))
    return aligned(lines, 1)


def hospital_cells(one: Assessment, names: Sequence[str]) -> list[str]:
    """A line of the table of the hospitals: name, rows, dropped rows, and these measures."""
    found = [one.hospital, f"{one.rows:,}", f"{one.dropped:,}"]
    for name in names:
        value = getattr(one, name)
        if name == "events":
            text = f"{value:,.0f}" if isfinite(value) else BLANK
        elif name in ("observed", "expected") and value == round(value, 1):
            text = f"{value:,.10g}"
        elif name in ("observed", "expected", "rmse"):
            text = f"{value:,.{decimals(value)}f}" if isfinite(value) else BLANK
        else:
            text = rounded(value, 3)
        found.append(text)
    return found


def aligned(lines: Sequence[Sequence[str]], left: int) -> list[str]:
    """Lines of cells as text; the first `left` columns are set to the left, the rest to the right.

    >>> aligned([["", "n"], ["north", "12"]], 1)
    ['        n', 'north  12']
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    found = []
    for line in lines:
        padded = []
        for place, (text, wide) in enumerate(zip(line, widths, strict=True)):
            padded.append(text.ljust(wide) if place < left else text.rjust(wide))
        found.append("  ".join(padded).rstrip())
    return found


# ---- CSV, LaTeX, HTML ----


def csv_text(result: Regression, level: float) -> str:
    """The table of coefficients as CSV; every number can be read back exactly."""
    names = result.columns()
    rows: list[Sequence[Any]] = [names]
    for row in result.rows(level):
        rows.append([None if value != value else value for value in row[: len(names)]])
    return to_csv(rows)


def latex_table(result: Regression, level: float) -> str:
    """The table of coefficients as a LaTeX tabular with the rules of booktabs."""
    ratio = result.family.ratio
    heads = ["", "Estimate", "SE", f"${result.columns()[4]}$", "$p$"]
    heads.append(f"{ratio.capitalize()} ({percent(level)} CI)" if ratio else f"{percent(level)} CI")
    return tabular(
        [_latex_head(text) for text in heads],
        [_latex_cells(row, bool(ratio)) for row in result.rows(level)],
        notes=[title_of(result)],
    )


def _latex_head(text: str) -> str:
    """A heading: formulas stay formulas."""
    return text if text.startswith("$") else escaped(text)


def _latex_cells(row: Coefficient, ratios: bool) -> list[str]:
    """A line of the LaTeX table."""
    name = f"{row.term} ({row.unit})" if row.unit else row.term
    estimate, error, statistic, p, low, high, *ratio = cells(row, ratios)
    interval = f"[{low}, {high}]"
    if ratio:
        interval = f"{ratio[0]} [{ratio[1]}, {ratio[2]}]" if ratio[0] else ""
    numbers = [estimate, error, statistic, p, interval]
    return [escaped(name), *[_latex_number(text) for text in numbers]]


def _latex_number(text: str) -> str:
    """Numbers with a true minus sign, and a true less-than sign."""
    return text.replace("-", "$-$").replace("<", "$<$")


def html_table(result: Regression, level: float) -> str:
    """A small table for notebooks."""
    ratio = result.family.ratio
    heads = ["term", "unit", "estimate", "std. error", result.columns()[4], "p"]
    heads += [f"{percent(level)} from", "to"]
    if ratio:
        heads += [ratio, "from", "to"]
    lines = []
    for row in result.rows(level):
        texts = [row.term, row.unit, *cells(row, bool(ratio))]
        lines.append("".join(f"<td>{escape(text)}</td>" for text in texts))
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    caption = escape(title_of(result))
    return (
        f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )
