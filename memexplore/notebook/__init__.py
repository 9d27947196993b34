"""Widgets and IPython magics: from a Tape or a training step to what a notebook shows.

- `view.py`: the widget of one tape. `view_content.py` computes what it sends, `packing.py` packs it.
- `explore.py`, `explorer.py`: the widget that runs a step with other knobs. `controls.py` has one control per knob,
  `explorer_layout.py` and `explorer_html.py` arrange them, `tabs.py` fills the explorer's own tabs.
- `magics.py`, `options.py`, `profile.py`: `%%memprofile`, `%memprofile` and `%memgpu`.
- `main_thread.py`: work for the kernel when it is idle. `static_output.py`: images for notebooks without a kernel.
- `frontend/`: the browser's part, ES modules that `bundle.py` joins at import, without node. `view.js` composes the
  others, `types.d.ts` has all messages. Check with ``npm ci`` once, then ``npm test`` and ``npm run types``.

To add a chart or a table in a tab of its own:

1. Write a function from a Tape to a plotly figure in ``memexplore/figures``, with a test.
2. Return the content of the tab: ``{"kind": "figure", "figure": figure.to_dict()}``, or "table" or "code"
   (`AddedTab` in ``frontend/types.d.ts``).
3. For the explorer, add it to `explorer_tabs` in `tabs.py`. For any view, call ``view.put_tabs({"My tab": content})``.

No JavaScript is needed. A tab that follows the cursor or needs an answer to a click is a built-in one: add a request to
`View._answer_request`, its content to `view_content.py`, and a module like ``frontend/blocks.js`` to ``details.js``.
"""
