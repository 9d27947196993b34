// Hover texts of the timeline, which arrive after its traces.
import { isSameWindow } from "./zoom.js";

/**
 * Return the change of the trace of events that adds hover texts; null if the timeline shows another window by now.
 * @param {import("./types").Hover} hover
 * @param {import("./types").Window} window
 * @param {number} count number of events drawn
 */
export function hoverChange({ window: textWindow, text, ...rest }, window, count) {
  if (!isSameWindow(textWindow, window) || text.length !== count) return null;
  return { text: [text], ...rest };
}
