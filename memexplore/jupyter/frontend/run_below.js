// A button that puts a cell below the one that shows it, and runs it.

const ELSEWHERE = "This page cannot add a cell: run %memoom cell";

/**
 * Return the code cell and the notebook of JupyterLab around an element of a widget, null elsewhere.
 * @param {import("./types").CellModel} model
 * @param {HTMLElement} el
 */
async function placeOf(model, el) {
  const own = await model.widget_manager?.get_model?.(model.get("comm_id"));
  const session = own?.widget_manager.context?.sessionContext;
  for (const view of await Promise.all(Object.values(own?.views ?? {}))) {
    if (!session || !view.el.contains(el)) continue;
    let cell = null;
    for (let widget = /** @type {import("./types").LabWidget | null} */ (view.luminoWidget); widget; ) {
      if (widget.model?.type === "code") cell = widget;
      if (cell && widget.widgets && widget.activeCellIndex !== undefined) return { cell, notebook: widget, session };
      widget = widget.parent;
    }
  }
  return null;
}

/**
 * @param {import("./types").CellModel} model
 * @param {HTMLElement} el
 */
async function runBelow(model, el) {
  const place = await placeOf(model, el);
  if (!place) return false;
  const { cell, notebook, session } = place;
  const index = (notebook.widgets ?? []).indexOf(cell) + 1;
  notebook.model?.sharedModel.insertCell(index, {
    cell_type: "code",
    source: model.get("source"),
    metadata: { trusted: true },
  });
  const added = notebook.widgets?.[index];
  if (!added) return false;
  notebook.activeCellIndex = index;
  // JupyterLab runs a cell by its class: outputs, number and busy state are those of any other cell.
  const CodeCell = /** @type {{ execute(cell: unknown, session: unknown): Promise<unknown> }} */ (
    /** @type {unknown} */ (added.constructor)
  );
  void CodeCell.execute(added, session);
  added.node.scrollIntoView({ block: "start" });
  return true;
}

export default {
  /** @param {{ model: import("./types").CellModel, el: HTMLElement }} widget */
  render({ model, el }) {
    const button = document.createElement("button");
    button.className = "jupyter-button mod-primary";
    button.style.width = "auto";
    button.textContent = "Put it below and run it";
    button.onclick = async () => {
      button.disabled = true;
      const isRunning = await runBelow(model, el).catch(() => false);
      button.textContent = isRunning ? "It runs below" : ELSEWHERE;
    };
    el.append(button);
  },
};
