"""HTML report of a Tape: one stand-alone page that works offline."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from plotly.offline import get_plotlyjs

from memexplore.analysis.addresses import fragmentation_text, has_segments
from memexplore.analysis.curves import peak
from memexplore.analysis.growth import growth_text
from memexplore.analysis.periods import periods
from memexplore.analysis.picture import first_moment, picture
from memexplore.analysis.placements import placement_note
from memexplore.analysis.rank import nccl_text, rank_text
from memexplore.analysis.summary import summary
from memexplore.analysis.verdict_content import VerdictContent, verdict_content
from memexplore.figures import values
from memexplore.figures.blocks import blocks_figure
from memexplore.figures.layers import layers_tree
from memexplore.figures.palette import FONT, Theme
from memexplore.figures.static import image
from memexplore.figures.tables import categories_table, growth_table, lines_table, tensors_table
from memexplore.figures.timeline import timeline
from memexplore.out_of_memory.html import html as post_mortem_html
from memexplore.text.units import size_text

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from memexplore.analysis.comparison import Comparison
    from memexplore.out_of_memory.value import PostMortem
    from memexplore.tape import Tape

_POINTS = 5000

_STYLE = f"""
:root {{ color-scheme: light dark; --text: #222; --muted: #666; --page: #fff; --rule: #ddd; --odd: #f6f6f6; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --text: #ddd; --muted: #9a9a9a; --page: #111; --rule: #383838; --odd: #1a1a1a; }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: 1.5rem; max-width: 1500px; font: 15px/1.5 {FONT};
  color: var(--text); background: var(--page); }}
h1 {{ font-size: 1.35rem; line-height: 1.35; margin: 0; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.1rem; margin: 2.2rem 0 0.2rem; }}
p {{ margin: 0.2rem 0 0.8rem; max-width: 60rem; }}
.note {{ color: var(--muted); }}
.where {{ margin: 0 0 0.8rem; overflow-wrap: anywhere; }}
.where li {{ list-style: none; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 0.9rem; }}
th, td {{ text-align: left; vertical-align: top; padding: 0.25rem 0.8rem 0.25rem 0.4rem; }}
thead th {{ border-bottom: 2px solid var(--rule); white-space: nowrap; }}
thead button {{ font: inherit; font-weight: 600; color: inherit; background: none; border: 0; padding: 0;
  cursor: pointer; }}
th[aria-sort=ascending] button::after {{ content: " ▲"; }}
th[aria-sort=descending] button::after {{ content: " ▼"; }}
tbody tr:nth-child(odd) {{ background: var(--odd); }}
.short {{ white-space: nowrap; }}
.number {{ text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }}
code {{ font-size: 0.95em; overflow-wrap: break-word; }}
"""

# The text colour of the figures follows the light or dark setting of the page.
_SCRIPT = """
const dark = matchMedia("(prefers-color-scheme: dark)");
const colour = () => dark.matches ? DARK : LIGHT;
const config = {responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"]};
for (const holder of document.querySelectorAll("script[type='application/json']")) {
  const figure = JSON.parse(holder.textContent), target = document.getElementById(holder.dataset.target);
  figure.layout.font.color = colour();
  Plotly.newPlot(target, figure.data, figure.layout, config);
  dark.addEventListener("change", () => Plotly.relayout(target, {"font.color": colour()}));
}
for (const table of document.querySelectorAll("table.memexplore")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const compare = (one, other) => key(one).localeCompare(key(other), undefined, {numeric: true});
      body.append(...[...body.rows].sort((one, other) => down ? compare(other, one) : compare(one, other)));
    });
  });
}
"""


def html(tape: Tape, post_mortem: PostMortem | None = None, plotly: str | None = None) -> str:
    """Return a stand-alone HTML page: verdict, post-mortem, timeline, layers, tensors, lines, growth, blocks, sources.

    The page contains plotly.js (about 5 MB) and loads nothing, or loads it from the address `plotly`, which several
    pages can share. It follows the light or dark setting of the browser; without JavaScript it shows the static image.

    >>> from memexplore.tape import Meta, Source, Tape
    >>> page = html(Tape.from_columns({"address": [0], "size": [10]}, meta=Meta(Source.MEASURED, "cpu")))
    >>> page.startswith("<!DOCTYPE html>")
    True

    Raises ValueError for a tape that is not placed.
    """
    verdict, drawn = verdict_content(tape), picture(tape)
    parts = [
        f'<h1 class="{verdict.level}">{escape(verdict.headline)}</h1>',
        f'<p class="note">{escape(verdict.detail)}</p>',
        _where(verdict),
        *_post_mortem(post_mortem),
        f"<noscript>{image(tape)}</noscript>",
        _figure("timeline", timeline(drawn, points=_POINTS)),
        *_tables(tape),
    ]
    return _page(verdict.headline, parts, plotly)


def comparison_html(comparison: Comparison) -> str:
    """Return a stand-alone HTML page: what differs between a measured and a predicted run, and both of them.

    The timeline is the measured one with the predicted one as an outline; what follows is of the measured run.

    >>> from memexplore.analysis.comparison import compare_tapes
    >>> from memexplore.tape import Meta, Source, Tape
    >>> tape = Tape.from_columns({"address": [0], "size": [10]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> "equal to the byte" in comparison_html(compare_tapes(tape, tape[:]))
    True
    """
    measured = comparison.measured
    names = f"Measured on {measured.meta.device} · predicted: the outline"
    parts = [
        f"<h1>{escape(comparison.text)}</h1>",
        f'<div class="wide">{values.comparison_tables(comparison)}</div>',
        f'<p class="note">{escape(names)}</p>',
        f"<noscript>{image(measured)}{image(comparison.predicted)}</noscript>",
        _figure("timeline", timeline(measured, points=_POINTS, before=comparison.predicted)),
        *_tables(measured),
    ]
    return _page(comparison.text, parts, None)


def _page(title: str, parts: list[str], plotly: str | None) -> str:
    script = _SCRIPT.replace("DARK", f'"{Theme.DARK.value}"').replace("LIGHT", f'"{Theme.LIGHT.value}"')
    scripts = "'unsafe-inline'" if plotly is None else "'unsafe-inline' 'self' file:"
    policy = f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:"
    library = f"<script>{get_plotlyjs()}</script>" if plotly is None else f'<script src="{escape(plotly)}"></script>'
    head = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
    ]
    return "\n".join([*head, *parts, f"{library}<script>{script}</script></body></html>"])


def _tables(tape: Tape) -> list[str]:
    """Return what a page has below its timeline."""
    drawn = picture(tape)
    first = first_moment(drawn)
    row, moment = first.row if len(drawn) else None, first.text
    return [
        "<h2>Layers</h2>",
        f'<p class="note">Allocated bytes of each layer and its sublayers {moment}. Click a layer to fold it.</p>',
        f'<div class="wide">{layers_tree(drawn, row)}</div>',
        f"<h2>Largest tensors {moment}</h2>",
        '<p class="note">Requested bytes, and the line of your code that allocated each tensor. '
        "Click a heading to sort.</p>",
        f'<div class="wide">{tensors_table(drawn, row)}</div>',
        f"<h2>Lines {moment}</h2>",
        f'<p class="note">Allocated bytes {moment} by the innermost line of your code that allocated them.</p>',
        f'<div class="wide">{lines_table(drawn, row)}</div>',
        *_growth(tape),
        *_blocks(tape),
        "<h2>Categories at the peak</h2>",
        '<p class="note">Allocated bytes: blocks after rounding.</p>',
        f'<div class="wide">{categories_table(drawn)}</div>',
        "<h2>Sources and assumptions</h2>",
        _facts(tape),
    ]


def _post_mortem(post_mortem: PostMortem | None) -> list[str]:
    return [] if post_mortem is None else ["<h2>Post-mortem</h2>", post_mortem_html(post_mortem)]


def _where(verdict: VerdictContent) -> str:
    """Return the lines that the verdict is about; all but the first behind a disclosure."""
    lines = [
        f'<span title="{escape(place.path)}">{escape(place.text)}</span>'
        + (f": <code>{escape(place.code)}</code>" if place.code else "")
        for place in verdict.where
    ]
    if len(lines) < 2:
        return "".join(f'<p class="where">at {line}</p>' for line in lines)
    rest = "".join(f"<li>{line}</li>" for line in lines[1:])
    return f'<details class="where"><summary>at {lines[0]}</summary><ul>{rest}</ul></details>'


def _growth(tape: Tape) -> list[str]:
    text = growth_text(tape)
    if not text:
        return []
    return [
        f"<h2>Growth from {periods(tape).unit} to {periods(tape).unit}</h2>",
        f'<p class="note">{escape(text)}</p>',
        f'<div class="wide">{growth_table(tape)}</div>',
    ]


def _blocks(tape: Tape) -> list[str]:
    row = peak(tape)[1]
    if row < 0 or not peak(tape, "reserved")[0] or not has_segments(tape):
        return []
    return [
        "<h2>Segments and blocks at the peak</h2>",
        f'<p class="note">{escape(fragmentation_text(tape, row))}</p>',
        _figure("blocks", blocks_figure(tape, row)),
    ]


def _figure(name: str, figure: go.Figure) -> str:
    # A module may have any name, even "</script>", so "<" is escaped.
    data = figure.to_json().replace("<", "\\u003c")
    return f'<div id="{name}"></div><script type="application/json" data-target="{name}">{data}</script>'


def _facts(tape: Tape) -> str:
    meta, result = tape.meta, summary(tape)
    facts = {
        "source": meta.source.value,
        "device": meta.device,
        "capacity": size_text(meta.capacity) if meta.capacity is not None else "",
        "total memory": size_text(meta.total) if meta.total is not None else "",
        "outside the allocator": nccl_text(tape).removeprefix("plus "),
        "rank": rank_text(tape).removeprefix("rank "),
        "allocator settings": meta.settings,
        **meta.versions,
        "events": f"{len(tape):,}",
        "steps": str(result["steps"]),
        "peak requested": size_text(result["peak_requested"]),
        "peak allocated": size_text(result["peak_allocated"]),
        "peak reserved": size_text(result["peak_reserved"]),
    }
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items() if value
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in (*meta.notes, placement_note(tape)) if note)
    return f'<div class="wide"><table>{rows}</table></div>' + (f"<ul>{notes}</ul>" if notes else "")
