// The layout of a timeline that is saved as a picture: what the page shows around the axes becomes a part of it.

const TITLE_HEIGHT = 30; // pixels

/**
 * Return a layout with a title above the axes, the verdict and the day, by which two pictures can be told apart, and
 * plotly's legend below them.
 * @param {import("./types").Layout} layout with its size in pixels
 * @param {string} headline of the verdict
 * @param {number} legend height of the legend in pixels
 * @param {Date} [day]
 * @returns {import("./types").Layout}
 */
export function savedLayout(layout, headline, legend, day = new Date()) {
  const text = `<b>${headline.replaceAll("<", "&lt;")}</b> · ${day.toLocaleDateString("sv")}`;
  const corner = { x: 0, xref: "container", y: 1, yref: "container", yanchor: "top", pad: { l: 12, t: 10 } };
  const { t = 0, b = 0 } = layout.margin ?? {};
  return {
    ...layout,
    title: { text, ...corner, font: { size: 14 } },
    showlegend: true,
    legend: { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom", traceorder: "normal" },
    margin: { ...layout.margin, t: t + TITLE_HEIGHT, b: b + legend },
    height: (layout.height ?? 0) + TITLE_HEIGHT + legend,
  };
}
