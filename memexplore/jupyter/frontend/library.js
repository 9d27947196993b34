// plotly.js, sent by the kernel once per page and shared by all notebooks of the page, by version.
import { unzip } from "./unpacking.js";

const RETRY_MS = 30_000; // the view whose request is pending may have been closed
const POLL_MS = 1000;

/** @typedef {{ Plotly: import("./types").Plotly | null, requestedAt: number, waiting: (() => void)[] }} Shared */
const page = /** @type {{ __memexplore?: Map<string, Shared>, Plotly?: any }} */ (globalThis);
const libraries = (page.__memexplore ??= new Map());

/**
 * @param {string} version
 * @returns {Shared}
 */
function library(version) {
  const shared = libraries.get(version) ?? { Plotly: null, requestedAt: -Infinity, waiting: [] };
  libraries.set(version, shared);
  return shared;
}

/**
 * Return plotly.js, requested from the kernel if the page does not have it; null if the view is closed meanwhile.
 * @param {import("./types").Model} model
 * @param {() => boolean} isAlive
 */
export async function loadPlotly(model, isAlive) {
  const shared = library(model.get("plotly"));
  while (!shared.Plotly && isAlive()) {
    if (Date.now() - shared.requestedAt > RETRY_MS) {
      shared.requestedAt = Date.now();
      model.send({ type: "plotly" });
    }
    await /** @type {Promise<void>} */ (
      new Promise((resolve) => {
        shared.waiting.push(resolve);
        setTimeout(resolve, POLL_MS);
      })
    );
  }
  return shared.Plotly;
}

/**
 * Run the compressed source of plotly.js, and restore `window.Plotly`: JupyterLab's own renderer may keep another version
 * there.
 * @param {string} version
 * @param {DataView} buffer
 */
export async function receivePlotly(version, buffer) {
  const shared = library(version);
  if (shared.Plotly) return;
  const before = Object.getOwnPropertyDescriptor(globalThis, "Plotly");
  const url = URL.createObjectURL(new Blob([await unzip(buffer)], { type: "text/javascript" }));
  try {
    await import(url);
    shared.Plotly = page.Plotly;
  } finally {
    URL.revokeObjectURL(url);
    if (before) Object.defineProperty(globalThis, "Plotly", before);
    else delete page.Plotly;
  }
  for (const resolve of shared.waiting.splice(0)) resolve();
}
