"""Formulas of docstrings as TeX, and the TeX of a built site as pictures of formulas.

A docstring is read in an editor, so its formulas are plain text: `H^-1 g`, `sum_S w_i`. The site
shows them as TeX sets them. KaTeX does that while the site is built, in a JavaScript engine that
comes as a Python package: a reader loads a style sheet and fonts, no script, and a formula that
KaTeX does not understand ends the build. KaTeX itself lies in docs/katex.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from html import unescape
from pathlib import Path
from textwrap import dedent

KATEX = Path(__file__).parent / "katex"
PLACE = re.compile(
    r'<(?P<tag>div|span) class="arithmatex">(?:\\\[|\\\()(?P<tex>.*?)(?:\\\]|\\\))</(?P=tag)>',
    re.DOTALL,
)

GREEK = "alpha beta gamma delta eps zeta eta theta lam mu xi rho tau phi Delta Gam Lam Omega"
LETTERS = {name: f"\\{name}" for name in GREEK.split()} | {
    "eps": "\\varepsilon",
    "lam": "\\lambda",
    "Lam": "\\Lambda",
    "phi": "\\varphi",
    "Gam": "\\Gamma",
    "gam": "\\gamma",
}
FUNCTIONS = {
    "max": "\\max",
    "min": "\\min",
    "exp": "\\exp",
    "cos": "\\cos",
    "sum": "\\sum",
    "grad": "\\nabla",
    "clip": "\\operatorname{clip}",
    "sign": "\\operatorname{sign}",
    "tr": "\\operatorname{tr}",
}
SIGNS = {
    "<-": "\\leftarrow",
    "<=": "\\le",
    ">=": "\\ge",
    "+=": "\\mathrel{+}=",
    "-=": "\\mathrel{-}=",
    "[": "[",
    "]": "]",
}
RELATIONS = ("=", "\\leftarrow", "\\mathrel")
TOKEN = re.compile(
    r"""(?P<space>\s+)
    | (?P<sign><-|<=|>=|\+=|-=)
    | (?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)
    | (?P<word>[A-Za-z]+(?:-[a-z]+)+|[A-Z]+[a-z]+[A-Z]\w*(?:-\w+)?)   # T-th, FedAdam
    | (?P<name>[A-Za-z]+\d?(?:_(?:\{[^}]*\}|[A-Za-z]+))?)
    | (?P<raised>\^-?(?:\d+|[A-Za-z]))
    | (?P<lowered>_[A-Za-z]+)
    | (?P<other>.)""",
    re.VERBOSE,
)


# ---- plain text to TeX ----


def block(text: str, symbols: Collection[str] = ()) -> str:
    """An indented paragraph of a docstring for Markdown: formulas as TeX, a list of words as it is.

    Args:
        text: The paragraph. Three spaces or more separate a formula from the next or a remark.
        symbols: Words that are names of numbers, such as "drift"; other words are English.
    """
    lines = dedent(text).rstrip().splitlines()
    if any(line.startswith(" ") for line in lines) or _wordy(lines, symbols):
        return "\n".join(["```", *lines, "```"])
    shown = [_line(line, symbols) for line in lines]
    if len(shown) > 1:
        body = " \\\\\n".join(_aligned(line) for line in shown)
        shown = ["\\begin{aligned}", body, "\\end{aligned}"]
    return "\n".join(["```math", *shown, "```"])


def tex(text: str, symbols: Collection[str] = ()) -> str:
    """One formula as TeX. Words that are no symbols become upright text."""
    parts: list[str] = []
    words: list[str] = []
    bars = 0
    found = [(match.lastgroup or "", match[0]) for match in TOKEN.finditer(text)]
    for place, (kind, token) in enumerate(found):
        if _is_word(kind, token, symbols, found[place + 1 : place + 3]):
            words.append(token)
            continue
        if kind == "space" or (words and token == ","):
            if words:
                words[-1] += token
            continue
        if words:
            parts.append(_text(words, before=bool(parts)))
            words = []
        bars += token == "|"
        parts.append(_token(kind, token, bars, text_before=_last(found, place)))
    if words:
        parts.append(_text(words, before=bool(parts)).rstrip())
    return _roots(re.sub(r" (?=['^_,;)\]])|(?<=[(\[]) ", "", " ".join(parts)))


def _text(words: list[str], before: bool) -> str:
    """English words between formulas."""
    inside = "".join(words)
    return f"\\text{{{' ' if before else ''}{inside.rstrip()} }}"


def _last(found: list[tuple[str, str]], place: int) -> bool:
    """Whether the token before is directly followed by this one."""
    return place > 0 and found[place - 1][0] != "space"


def _is_word(kind: str, token: str, symbols: Collection[str], after: list[tuple[str, str]]) -> bool:
    """Whether a token is English: a long name that is no symbol, or an article before one."""
    if kind == "word":
        return True
    if kind != "name":
        return False
    base = token.partition("_")[0]
    known = base in LETTERS or base in FUNCTIONS or base.rstrip("0123456789") in LETTERS
    if known or base == "sqrt" or token in symbols or base in symbols or "_" in token:
        return False
    if len(base) == 1:
        following = after[-1] if len(after) == 2 and after[0][0] == "space" else ("", "")
        return token == "a" and _is_word(*following, symbols, [])
    return True


def _token(kind: str, token: str, bars: int, text_before: bool) -> str:
    """One token that is no word."""
    if kind == "name":
        return _name(token)
    if kind == "raised":
        power = "\\top" if token == "^T" else token[1:]
        return f"^{{{power}}}"
    if kind == "lowered":
        return f"_{{{_name(token[1:])}}}"
    if token == "|":
        return "\\lVert" if bars % 2 else "\\rVert"
    if token == "<":
        return "\\langle"
    if token == ">":
        return "\\rangle" if text_before else ">"
    return SIGNS.get(token, token)


def _name(token: str) -> str:
    """A symbol with its index."""
    base, _, index = token.partition("_")
    if index == "hat":
        return f"\\hat{{{_name(base)}}}"
    known = base in LETTERS or base in FUNCTIONS
    if min(len(base), len(index)) > 1 and not known and "{" not in index:  # weight_decay
        whole = token.replace("_", "\\_")
        return f"\\mathit{{{whole}}}\\,"
    number = base[-1] if base[-1].isdigit() else ""
    base = base.removesuffix(number)
    shown = FUNCTIONS.get(base) or LETTERS.get(base) or base
    if base == "sqrt":
        return "\\sqrt"
    if shown == base and len(base) > 1:
        shown = f"\\mathit{{{base}}}"
    index = index.strip("{}") or number
    return f"{shown}_{{{_inner(index)}}}" if index else shown


def _inner(index: str) -> str:
    """What stands below a symbol."""
    return _name(index) if index.isalpha() else index


def _roots(text: str) -> str:
    """Give every root the brackets' contents."""
    while (start := text.find("\\sqrt (")) >= 0:
        depth = 0
        for place in range(start + 6, len(text)):
            depth += (text[place] == "(") - (text[place] == ")")
            if depth == 0:
                break
        inside = text[start + 7 : place].strip()
        text = f"{text[:start]}\\sqrt{{{inside}}}{text[place + 1 :]}"
    return text


def _line(line: str, symbols: Collection[str]) -> str:
    """A line of formulas and remarks, with room between them."""
    line = re.sub(r"(?<=\w)\+(?=[ ;)])", "^{+}", line)  # y+ is the next y
    line = re.sub(r" {2,}(?:=|<-) +", lambda sign: f" {sign[0].strip()} ", line)
    parts = re.split(r" {3,}", line)
    return " \\qquad ".join(_segment(part, symbols) for part in parts)


def _segment(part: str, symbols: Collection[str]) -> str:
    """One formula or remark; the plus of `y+` is TeX already."""
    return tex(part, symbols).replace("^{ + }", "^{+}")


def _aligned(line: str) -> str:
    """A line whose first relation stands below those of the others."""
    places = [place for sign in RELATIONS if (place := line.find(sign)) >= 0]
    if not places:
        return f"& {line}"
    first = min(places)
    return f"{line[:first]}&{line[first:]}"


def _wordy(lines: list[str], symbols: Collection[str]) -> bool:
    """Whether a paragraph is rather English than mathematics."""
    words = 0
    others = 0
    for line in lines:
        found = [(match.lastgroup or "", match[0]) for match in TOKEN.finditer(line)]
        for place, (kind, token) in enumerate(found):
            if kind in ("name", "word", "number"):
                english = _is_word(kind, token, symbols, found[place + 1 : place + 3])
                words += english
                others += not english
    return words > others


# ---- TeX to HTML ----


def typeset(site: Path) -> list[str]:
    """Set the formulas of all pages of a built site.

    Returns:
        What KaTeX refused, with the page and the formula: a line for each.
    """
    from py_mini_racer import MiniRacer

    refused: list[str] = []
    with MiniRacer() as engine:  # left open, it keeps the process from ending
        engine.eval((KATEX / "katex.min.js").read_text(encoding="utf-8"))

        def render(match: re.Match[str]) -> str:
            source = unescape(match["tex"]).strip()
            options = {"displayMode": match["tag"] == "div", "throwOnError": False}
            made = str(engine.call("katex.renderToString", source, options))
            if "katex-error" in made:
                refused.append(f"{page.relative_to(site)}: {source}")
            return f'<{match["tag"]} class="formula">{made}</{match["tag"]}>'

        for page in sorted(site.rglob("*.html")):
            text = page.read_text(encoding="utf-8")
            if "arithmatex" in text:
                page.write_text(PLACE.sub(render, text), encoding="utf-8")
    return refused
