// Single and double clicks on a graph that plotly draws, as the browser counts them.
//
// plotly compares the times at which its handlers run: a press soon after a drag is a double click to it, and on a busy
// page the two presses of a double click are single ones. The browser compares the times of the events and their places.

/** @typedef {import("./types").Click["points"]} Points */

/**
 * Report presses and clicks: a double click is a press, a click and a double click.
 * @param {Pick<import("./types").Graph, "addEventListener" | "on">} graph
 * @param {{ onPress: () => void, onClick: (points: Points, event?: MouseEvent) => void, onDoubleClick: () => void }} handlers
 */
export function reportClicks(graph, { onPress, onClick, onDoubleClick }) {
  let presses = 0; // of one place in a short time; 0 where only plotly counts, as for touches
  let isReported = false;
  const pressed = (/** @type {MouseEvent} */ { detail }) => {
    presses = detail;
    if (detail === 1) onPress();
  };
  graph.addEventListener("mousedown", pressed, true);
  graph.addEventListener("touchstart", () => void (presses = 0), { capture: true, passive: true });
  // plotly reports the second press of a double click as both, in one task.
  const reportDouble = () => {
    isReported = true;
    setTimeout(() => (isReported = false));
    onDoubleClick();
  };
  graph.on("plotly_doubleclick", () => {
    if (presses !== 1) reportDouble();
  });
  graph.on("plotly_click", ({ points, event }) => {
    if (isReported) return;
    if (presses > 1) reportDouble();
    else onClick(points, event);
  });
}
