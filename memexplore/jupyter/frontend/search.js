// The search for settings that fit: its button, its progress with an estimate, and Stop.
import { element } from "./dom.js";

/** @typedef {import("./types").ExplorerState["search"]} SearchState */

const TICK_MS = 1000;
const RUNS = "A run is that of a setting, or of a setting with another batch to find its largest one.";

export class Search {
  /** @param {(request: { type: string }) => void} onRequest */
  constructor(onRequest) {
    this.drawn = "";
    /** @type {SearchState | null} */
    this.running = null;
    this.since = 0; // of the latest report, ms
    /** @type {ReturnType<typeof setInterval> | undefined} */
    this.timer = undefined;
    this.root = element("div", "fit");
    this.start = element("button", "action", "What would fit?");
    this.start.type = "button";
    this.start.addEventListener("click", () => onRequest({ type: "search" }));
    this.bar = element("progress", "progress");
    this.bar.setAttribute("aria-label", "Progress of the search");
    this.text = element("span", "fit-text");
    this.stop = element("button", "action", "Stop");
    this.stop.type = "button";
    this.stop.title = "Stop the search; what it found stays";
    this.stop.addEventListener("click", () => onRequest({ type: "stop" }));
    this.root.append(this.start, this.bar, this.text, this.stop);
  }

  /** @param {SearchState} search */
  draw(search) {
    const drawn = JSON.stringify(search);
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    const isRunning = search.state === "running";
    const hadFocus = document.activeElement === this.start || document.activeElement === this.stop;
    this.start.hidden = isRunning;
    this.start.disabled = search.state === "unavailable";
    this.start.title = search.state === "unavailable" ? search.text : "Search for settings that fit this GPU";
    this.bar.hidden = this.stop.hidden = !isRunning;
    if (search.planned) {
      this.bar.max = search.planned;
      this.bar.value = Math.min(search.done, search.planned);
    } else {
      this.bar.removeAttribute("value");
    }
    this.running = isRunning && search.planned ? search : null;
    this.since = Date.now();
    this.text.textContent = search.text;
    this.text.title = search.done ? `${search.text}. ${RUNS}` : search.text;
    this.close();
    if (this.running) {
      this.tick();
      this.timer = setInterval(() => this.tick(), TICK_MS);
    }
    if (hadFocus) (isRunning ? this.stop : this.start).focus();
  }

  tick() {
    if (this.running) this.text.textContent = progressText(this.running, (Date.now() - this.since) / 1000);
  }

  close() {
    clearInterval(this.timer);
    this.timer = undefined;
  }
}

/**
 * Return the progress as of the latest report; an estimate whose time is over is not shown.
 * @param {SearchState} search
 * @param {number} elapsed seconds since the report
 */
export function progressText({ done, planned, seconds_left: left }, elapsed) {
  const count = `${done} of about ${planned}`;
  return left === null || left <= elapsed ? count : `${count} · about ${durationText(left - elapsed)} left`;
}

/**
 * Return a duration without false precision.
 * @param {number} seconds
 */
export function durationText(seconds) {
  if (seconds < 10) return `${Math.max(Math.ceil(seconds), 1)} s`;
  if (seconds < 90) return `${Math.ceil(seconds / 5) * 5} s`;
  return `${Math.ceil(seconds / 60)} min`;
}
