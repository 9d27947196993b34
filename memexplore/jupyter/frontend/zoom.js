// The zoomed window of the timeline, requested from the kernel once the zoom has stopped changing.

/** @typedef {import("./types").Window} Window */

const SETTLE_MS = 150;

/**
 * Return the rows that a change of plotly's layout shows, undefined if it changes no rows.
 * @param {Record<string, any>} change
 * @returns {import("./types").Range | undefined}
 */
export function windowOf(change) {
  const [low, high] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
  return low === undefined ? change["xaxis.range"] : [low, high];
}

/**
 * Return whether two windows are the same.
 * @param {Window} one
 * @param {Window} other
 */
export function isSameWindow(one, other) {
  return one?.[0] === other?.[0] && one?.[1] === other?.[1];
}

export class Zoom {
  /**
   * @param {() => void} onSettled
   * @param {() => void} onChange called when the zoom begins or stops changing
   */
  constructor(onSettled, onChange) {
    this.onSettled = onSettled;
    this.onChange = onChange;
    /** @type {Window} */
    this.window = null;
    /** @type {ReturnType<typeof setTimeout> | null} */
    this.timer = null;
  }

  get isSettling() {
    return this.timer !== null;
  }

  /** @param {Window} window */
  show(window) {
    this.window = window;
    this.cancel();
    this.timer = setTimeout(() => this.settle(), SETTLE_MS);
    this.onChange();
  }

  /** Request the window now. */
  settle() {
    this.cancel();
    this.onSettled();
  }

  cancel() {
    if (this.timer !== null) clearTimeout(this.timer);
    this.timer = null;
  }
}
