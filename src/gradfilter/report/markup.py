"""Small pieces of HTML. Whatever comes from outside passes through `escape`."""

import html
from collections.abc import Iterable, Sequence

from gradfilter.report.text import clean


def escape(value: object) -> str:
    """Return a value as text that HTML shows as it is, inside elements and inside quoted attributes."""
    return html.escape(clean(str(value)))


def make_section(name: str, title: str, *content: str) -> str:
    """Return a section that links can lead to."""
    return f'<section id="{name}">\n<h2>{title}</h2>\n' + "\n".join(filter(None, content)) + "\n</section>"


def make_folded_section(name: str, title: str, *content: str) -> str:
    """Return a section that opens when its title is clicked."""
    head, inside = f"<summary><h2>{title}</h2></summary>", "\n".join(filter(None, content))
    return f'<section id="{name}">\n<details class="section">\n{head}\n{inside}\n</details>\n</section>'


def make_figure_element(svg: str, caption: str = "", kind: str = "") -> str:
    """Return a figure with a caption, both HTML already."""
    words = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f'<figure class="{kind}">{svg}{words}</figure>' if kind else f"<figure>{svg}{words}</figure>"


def make_table(columns: Sequence[str], rows: Iterable[str]) -> str:
    """Return a table that scrolls where it does not fit; a column that begins with "#" holds numbers."""
    heads = "".join(_head(column) for column in columns)
    body = "\n".join(rows)
    return f'<div class="scroll"><table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def make_row(head: object, *cells: str, mark: str = "") -> str:
    """Return a row; its head is escaped, a mark before it is HTML already, its cells come from the functions below."""
    return f'<tr><th scope="row">{mark}{escape(head)}</th>{"".join(cells)}</tr>'


def number_cell(value: object) -> str:
    """Return a cell whose content stands at the right."""
    return f'<td class="number">{escape(value)}</td>'


def text_cell(value: object) -> str:
    """Return a cell of text."""
    return f'<td class="text">{escape(value)}</td>'


def bar_cell(share: float, kind: str = "") -> str:
    """Return a cell with a bar that fills a share, 0 to 1, of its width."""
    filling = f'<i style="width: {100 * min(share, 1.0):.1f}%"></i>' if share > 0 else ""
    return f'<td><span class="{f"bar {kind}".rstrip()}">{filling}</span></td>'


def make_key_table(pairs: Iterable[tuple[str, object]]) -> str:
    """Return a table of names and values without a head."""
    rows = "\n".join(make_row(name, text_cell(value)) for name, value in pairs)
    return f'<div class="scroll"><table><tbody>\n{rows}\n</tbody></table></div>'


def make_code(text: str) -> str:
    """Return text as it is, in a box."""
    return f"<pre><code>{escape(text.rstrip())}</code></pre>"


def _head(column: str) -> str:
    name = column.removeprefix("#")
    return f'<th scope="col" class="number">{name}</th>' if name != column else f'<th scope="col">{name}</th>'
