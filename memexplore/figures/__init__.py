"""Figures of a Tape: plotly figures, an SVG image, HTML tables and plain text. Pure functions; nothing imports torch.

- `timeline`: allocated bytes by category over the events. `highlight` emphasises one layer in it, `bands` finds
  steps and phases, `scale` the range of the y axis, `alignment` matching rows of two tapes.
- `layers`: tree of layers as HTML. `blocks`: segments and blocks by address. `tradeoff`: time against memory.
  `scaling`: memory against a size, log-log.
- `static`: the timeline as SVG. `tables`: HTML tables. `text`: figures as plain text.
- `values`: one-line and HTML forms of a Tape and of the difference of two, and their parts: tables, bars, sparklines.
- `palette`: colours, fonts and axis ticks of every figure.

To add a chart, for example of bytes by phase:

1. Write ``phases_figure(tape: Tape, theme: Theme = Theme.ANY) -> go.Figure`` in a new file ``figures/phases.py``;
   `tradeoff.py` is an example. Compute numbers in `memexplore.analysis`, take colours and ticks from `palette`, and
   return a figure for an empty tape too.
2. Write ``phases_text(tape: Tape) -> str`` in `text.py`, the same content for a terminal: first
   `verdict_content(tape).text`, then a table made with `_columns`.
3. Test both in ``tests/figures/test_phases.py`` with `small_tape()` of ``tests/sample_tapes.py``, whose comments give
   the allocated bytes after every row. Add both to `test_empty_tape_has_figures` in `test_static_figures.py`.
4. Show the figure in a tab of the widget as ``memexplore/jupyter/__init__.py`` says, without JavaScript. For the HTML
   page add a heading and ``_figure("phases", phases_figure(tape))`` to `report.html`.
"""
