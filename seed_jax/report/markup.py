"""HTML of the pages: one self-contained file each. What models, environments and directories say is text and nothing
else: escaped here, and on the trajectory page written with textContent. A content security policy lets no script run
but the page's own."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).resolve().parent / "assets"


def visible(value: Any) -> str:
    """The text with control characters shown as their code, also those that change the direction of writing."""
    return "".join(
        f"\u27e8U+{ord(c):04X}\u27e9" if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c not in "\n\t" else c
        for c in str(value)
    )


def text(value: Any) -> str:
    """For between tags."""
    return html.escape(visible(value), quote=False)


def attribute(value: Any) -> str:
    """For between double quotes."""
    return html.escape(visible(value), quote=True)


def embed(name: str, value: Any) -> str:
    """Data for the page's script, which finds it by id. Nothing in it can end the element."""
    content = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        content = content.replace(sign, f"\\u{ord(sign):04x}")
    return f'<script type="application/json" id="{name}">{content}</script>'


def page(
    title: str, body: str, nav: Sequence[tuple[str, str]] = (), here: str = "", scripts: Sequence[str] = ()
) -> str:
    """A whole document. nav: (name, file) of sibling pages; here: its own file; scripts: files in assets/ that run
    after page.js, in order."""
    codes = [(ASSETS / name).read_text() for name in ("page.js", *scripts)]
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'" for code in codes
    )
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    links = "".join(
        f'<a href="{attribute(file)}"{" aria-current=page" if file == here else ""}>{text(name)}</a>'
        for name, file in nav
    )
    code = "".join(f"<script>{code}</script>" for code in codes)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{text(title)}</title>
<link rel="icon" href="data:,">
<style>{(ASSETS / "page.css").read_text()}</style>
</head>
<body>
<a class="skip" href="#main">Skip to content</a>
<header class="bar"><span class="brand">SEED</span><nav aria-label="Pages">{links}</nav>
<button id="theme" type="button" title="Light or dark">Theme</button></header>
<main id="main">
{body}
</main>
{code}
</body>
</html>
"""


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    left: int = 1,
    caption: str = "",
    classes: Sequence[Sequence[str]] | None = None,
) -> str:
    """A table with a button that copies it (tabs and lines, for a spreadsheet). Cells are texts; the first `left`
    columns are flush left. classes: a CSS class for each cell."""

    def cell(tag: str, value: Any, column: int, style: str = "") -> str:
        names = " ".join(filter(None, ("left" if column < left else "", style)))
        shown = "" if value is None else text(value)
        return f"<{tag}{f' class={chr(34)}{names}{chr(34)}' if names else ''}>{shown}</{tag}>"

    texts = {column for row in classes or () for column, style in enumerate(row) if "text" in style.split()}
    top = "".join(cell("th", value, column, "text" if column in texts else "") for column, value in enumerate(head))
    body = "".join(
        "<tr>"
        + "".join(cell("td", value, column, classes[r][column] if classes else "") for column, value in enumerate(row))
        + "</tr>"
        for r, row in enumerate(rows)
    )
    about = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
    return (
        f'<figure class="table">{about}<div class="scroll" tabindex="0"><table><thead><tr>{top}</tr></thead>'
        f'<tbody>{body}</tbody></table></div><button type="button" class="copy">Copy table</button></figure>'
    )


def details(summary: str, content: str) -> str:
    return f"<details><summary>{text(summary)}</summary>{content}</details>"


def card(title: str, content: str, note: str = "", wide: bool = False) -> str:
    """One chart or table with its heading; note: what it shows, in a sentence."""
    about = f'<p class="note">{text(note)}</p>' if note else ""
    return f'<section class="card{" wide" if wide else ""}"><h3>{text(title)}</h3>{about}{content}</section>'


def warning(content: str) -> str:
    return f'<p class="warning" role="note">{text(content)}</p>'


def signed(value: float | None, digits: int = 2) -> str:
    """With its sign, a dash for None."""
    return "\u2013" if value is None else f"{value:+.{digits}f}".replace("-", "\u2212")


def pm(value: float | None, error: float | None) -> str:
    """With its standard error where that is known, a dash for None."""
    return "\u2013" if value is None else f"{value:.3f} \u00b1 {error:.3f}" if error is not None else f"{value:.3f}"
