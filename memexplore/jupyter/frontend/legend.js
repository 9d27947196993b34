// Legend of the timeline: a button per trace that hides it or shows it again.
import { element, replaceKeepingFocus } from "./dom.js";
import { toolbar, updateToolbar } from "./toolbar.js";

/** @typedef {import("./types").Trace} Trace */

const DEFAULT_RANK = 1000; // plotly's
const OUTLINE = "before"; // trace with the curve of another tape

/**
 * Return the traces that the legend lists, in plotly's order.
 * @param {Trace[]} traces
 */
export function listedTraces(traces) {
  const rank = (/** @type {Trace} */ trace) => trace.legendrank ?? DEFAULT_RANK;
  return traces.filter((trace) => trace.showlegend !== false).sort((one, other) => rank(one) - rank(other));
}

export class Legend {
  /** @param {() => void} onChange called when a trace is hidden or shown */
  constructor(onChange) {
    this.root = toolbar("legend", "Legend: show or hide");
    this.onChange = onChange;
    /** @type {Set<string>} */
    this.hidden = new Set();
    this.outline = OUTLINE; // what the outline is called
    /** @type {Trace[]} */
    this.traces = [];
  }

  /**
   * Return the traces that are not hidden.
   * @param {Trace[]} traces
   */
  visible(traces) {
    return traces.filter(({ name }) => !this.hidden.has(name));
  }

  /** @param {Trace[]} traces */
  draw(traces) {
    this.traces = traces;
    replaceKeepingFocus(this.root, listedTraces(traces).map((trace) => this.entry(trace)));
    updateToolbar(this.root);
  }

  /**
   * Name the setting whose curve is the outline.
   * @param {string} name
   */
  nameOutline(name) {
    if (name === this.outline) return;
    this.outline = name;
    this.draw(this.traces);
  }

  /** @param {Trace} trace */
  entry({ name, stackgroup, fillcolor, fillpattern, line }) {
    const title = name === OUTLINE ? this.outline : name;
    const button = element("button", "entry", title);
    const swatch = element("span", stackgroup ? "swatch" : "stroke");
    if (fillpattern) swatch.style.background = hatching(fillpattern.fgcolor);
    else if (stackgroup) swatch.style.background = fillcolor ?? "";
    else if (line) swatch.style.borderTop = `${line.width}px ${line.dash === "dash" ? "dashed" : "solid"} ${line.color}`;
    button.prepend(swatch);
    button.title = `Show or hide ${title}`;
    const update = () => button.setAttribute("aria-pressed", String(!this.hidden.has(name)));
    update();
    button.addEventListener("click", () => {
      if (!this.hidden.delete(name)) this.hidden.add(name);
      update();
      this.onChange();
    });
    return button;
  }
}

/** @param {string} colour */
function hatching(colour) {
  return `repeating-linear-gradient(135deg, ${colour} 0 2px, transparent 2px 4px)`;
}
