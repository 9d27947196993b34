"""Widgets and IPython magics: from a Tape or a training step to the output in a notebook.

- `view.py`: the widget of one tape. `view_content.py` and `cursor_details.py` compute its content, `packing.py`
  packs it.
- `explore.py`, `explorer.py`: a step that runs with other knobs, and its view. `explorer_state.py` has what a request
  changes, as functions from a state to a state; `layers.py` what applies to a layer; `explorer_message.py` the message
  to the page. `explorer_search.py` searches beside the kernel, `own_source.py` finds the person's code of a step,
  `results.py` runs settings ahead of a request, `tabs.py` fills the explorer's own tabs. The controls come from the
  knobs themselves (`run/knobs`).
- `live_page.py`, `live_message.py`, `live_knobs.py`, `live_leak.py`: the page of a watched run.
  `watching.py`: `memexplore.watch`, which shows it. `controls.py`: what an explorer and a watched run are to the view.
- `magics.py`, `options.py`, `profile.py`, `notebook_gpu.py`: `%%memprofile`, `%memprofile` and `%memgpu`; `dry_run.py`:
  its `--dry-run`. `memoom.py`, `memoom_page.py`, `recorded_cell.py`, `applied_setting.py`: `%memoom`.
- `cpu_names.py`: advice for a cell that ran on the CPU.
- `main_thread.py`, `idle_work.py`: work for the kernel when it is idle. `receiving.py`,
  `reopened_pages.py`: requests of the browser while a cell runs. `dropped_displays.py`: runs that display nothing.
  `static_output.py`: images for notebooks without a kernel.
- `frontend/`: the browser's part, ES modules that `bundle.py` joins at import, without node; all CSS files are joined
  too. `view.js` composes the others and `page.js` places them: `verdict.js`, `explorer.js` (with `changes.js`,
  `knobs.js`, `search.js`), `timeline.js`, `details.js` (tabs about the cursor) and `added_tabs.js` (tabs about
  settings). `kernel.js` notices that the kernel has ended. `types.d.ts` has all messages. Check with ``npm ci`` once,
  then ``npm test`` and ``npm run types``.

To add a chart or a table in a tab of its own, write its figure as ``memexplore/figures/__init__.py`` says, make the
content of the tab, ``{"kind": "figure", "figure": figure.to_dict()}`` or a "table" or "code" (`AddedTab` in
``frontend/types.d.ts``), and

- for every view of a tape: put it into `View._tabs` in `View.__init__`, and call `put_tabs` in `View.send_details`, so
  that it follows `view.tape`; or
- for the explorer: add it to `explorer_tabs` in `tabs.py`, with what it needs as a parameter (see its call in
  `explorer.py`). Its settings in `tabs.settings` make its rows and points clickable.

A user adds a tab to one view with ``view.put_tabs({"My tab": content})``. None of these needs JavaScript. A tab whose
content depends on the cursor does: add a request to `View._answer_request`, its content to `view_content.py`, and a
module like ``frontend/blocks.js`` to ``details.js``.
"""
