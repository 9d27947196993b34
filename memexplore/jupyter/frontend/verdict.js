// The verdict above the timeline: whether it fits, in one sentence, with a bar of the memory against the capacity.
import { element, uniqueId } from "./dom.js";

/** @typedef {import("./types").TapeContent} TapeContent */
/** @typedef {import("./types").Verdict} Verdict */

const WAITING = "Waiting for the kernel. Until it answers, this is a static image.";
const MARKS = { fits: "✓", tight: "!", growing: "↗", oom: "✗", error: "✗", none: "·" };

/**
 * Return the shares of the bar (0 to 1): memory in use within the capacity, memory beyond it, and the capacity.
 * @param {Pick<Verdict, "used" | "needed" | "capacity">} verdict
 */
export function barShares({ used, needed, capacity }) {
  const most = Math.max(used, needed);
  const end = Math.max(most, capacity ?? 0) || 1;
  const within = Math.min(most, capacity ?? most);
  return { within: within / end, beyond: (most - within) / end, capacity: capacity === null ? null : capacity / end };
}

export class VerdictBar {
  /** @param {{ onLine: (line: string) => void }} handlers `onLine` is called with the `file:line` that was clicked */
  constructor({ onLine }) {
    this.root = element("div", "verdict");
    this.mark = element("span", "mark");
    this.mark.setAttribute("aria-hidden", "true");
    this.headline = element("p", "headline", "\u00a0");
    this.detail = element("p", "detail", "\u00a0");
    this.grows = element("button", "grows");
    this.grows.type = "button";
    this.grows.hidden = true;
    const showLine = () => this.grows.hidden || onLine(this.grows.dataset.line ?? "");
    this.grows.addEventListener("click", showLine);
    this.headline.addEventListener("click", showLine); // by keyboard the button below it
    const group = uniqueId();
    this.where = disclosure("where", group);
    this.notes = disclosure("notes", group);
    this.applied = disclosure("applied", group);
    this.closeOthers = (/** @type {Event} */ { target }) => {
      for (const details of [this.where, this.notes, this.applied]) if (!details.contains(/** @type {Node} */ (target))) details.open = false;
    };
    document.addEventListener("pointerdown", this.closeOthers);
    this.problem = element("p", "problem");
    this.problem.setAttribute("role", "alert");
    this.gone = element("p", "gone");
    this.gone.setAttribute("role", "alert");
    this.bar = element("div", "capacity");
    this.bar.setAttribute("role", "img");
    this.within = element("span", "within");
    this.beyond = element("span", "beyond");
    this.limit = element("span", "limit");
    this.bar.append(this.within, this.beyond, this.limit);
    this.side = element("div", "verdict-side");
    this.device = element("span", "device");
    this.meter = element("div", "meter");
    this.meter.append(this.bar, this.device);
    this.side.append(this.meter);
    const more = element("span", "verdict-more");
    more.append(this.grows, this.where, this.notes, this.applied);
    this.text = element("div", "verdict-text");
    this.text.append(this.headline, this.detail, more);
    this.root.append(this.mark, this.text, this.side);
    this.problems = { request: "", setting: "" };
    this.reservedWidth = 0;
    // Called after the browser has computed the layout, which asking for a height would force.
    this.sizes = new ResizeObserver(([{ contentRect }]) => this.reserve(contentRect.width, contentRect.height));
    this.sizes.observe(this.text);
    this.drawnApplied = "";
    this.elements = [this.gone, this.root, this.problem, element("p", "waiting", WAITING)];
  }

  /** @param {TapeContent} content */
  draw({ verdict, notes }) {
    this.root.dataset.level = verdict.level;
    this.mark.textContent = MARKS[verdict.level];
    setText(this.headline, verdict.headline);
    setText(this.detail, detailText(verdict.detail));
    this.showProblem("");
    fill(this.where, "Where", verdict.where.map(whereEntry));
    const kind = notes.every((note) => note.startsWith("assumed: ")) ? "assumption" : "note";
    fill(this.notes, countText(notes.length, kind), notes.map((note) => element("li", "", note)));
    this.drawGrows(verdict.grows);
    this.drawBar(verdict);
  }

  /** @param {Verdict["grows"]} place the line whose memory grows */
  drawGrows(place) {
    this.grows.hidden = place === null;
    if (place === null) return;
    this.grows.dataset.line = place.path;
    this.grows.title = `Show what grows at ${place.path}`;
    this.grows.replaceChildren(`Grows at ${place.text}`, ...(place.code ? [element("code", "", place.code)] : []));
  }

  /**
   * Show what the knobs did besides what was asked, and where they were not applied.
   * @param {Pick<import("./types").ExplorerState, "notes" | "skipped">} state
   */
  drawApplied({ notes = [], skipped = [] }) {
    const entries = [...notes, ...skipped.map(({ site, reason }) => `${site}: ${reason}`)];
    const drawn = JSON.stringify(entries);
    if (drawn === this.drawnApplied) return;
    this.drawnApplied = drawn;
    fill(this.applied, appliedTitle(notes.length, skipped.length), entries.map((entry) => element("li", "", entry)));
  }

  /** @param {Verdict} verdict */
  drawBar(verdict) {
    const { within, beyond, capacity } = barShares(verdict);
    this.meter.hidden = capacity === null;
    this.device.textContent = verdict.device;
    this.bar.setAttribute("aria-label", verdict.headline);
    this.within.style.width = percent(within);
    this.beyond.style.width = percent(beyond);
    this.limit.style.left = percent(capacity ?? 1);
  }

  /**
   * Keep the height of the longest text so far: nothing below moves while a knob turns.
   * @param {number} width present width of the text
   * @param {number} height
   */
  reserve(width, height) {
    this.text.style.minHeight = width === this.reservedWidth ? `${height}px` : "";
    this.reservedWidth = width;
  }

  close() {
    this.sizes.disconnect();
    document.removeEventListener("pointerdown", this.closeOthers);
  }

  /**
   * Show why a request failed; the next tape drawn takes it away.
   * @param {unknown} error
   */
  showProblem(error) {
    this.problems.request = error instanceof Error ? error.message : String(error);
    setText(this.problem, problemText(this.problems));
  }

  /**
   * Show why a setting was not applied, as the kernel's newest state says.
   * @param {string} text
   */
  showRefusal(text) {
    this.problems.setting = text;
    setText(this.problem, problemText(this.problems));
  }

  /** @param {string} text */
  showGone(text) {
    this.gone.textContent = text;
  }
}

/**
 * Return the line below the headline, of which no line on the page begins with a dot, a percent sign or a version alone.
 * @param {string} detail
 */
export function detailText(detail) {
  return detail.replaceAll(" · ", "\u00a0· ").replace(/(?<=\d) %/g, "\u00a0%").replace(/, torch (?=\d)/, ", torch\u00a0");
}

/**
 * Return the line of problems: of a request, and of the setting.
 * @param {{ request: string, setting: string }} problems
 */
export function problemText({ request, setting }) {
  return [...new Set([request, setting])].filter(Boolean).join(" · ");
}

/**
 * Return the title of what the knobs did besides what was asked, apart from the notes on the tape.
 * @param {number} notes
 * @param {number} skipped
 */
export function appliedTitle(notes, skipped) {
  const parts = [notes && `${countText(notes, "note")} on this setting`, skipped && `${skipped} not changed`];
  return parts.filter(Boolean).join(", ");
}

/**
 * @param {number} count
 * @param {string} name
 */
function countText(count, name) {
  return `${count} ${name}${count === 1 ? "" : "s"}`;
}

/**
 * @param {string} name
 * @param {string} group of which one is open at a time
 */
function disclosure(name, group) {
  const details = element("details", name);
  details.name = group;
  details.classList.add("memexplore-disclosure");
  details.hidden = true;
  details.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !details.open) return;
    details.open = false;
    details.querySelector("summary")?.focus();
    event.stopPropagation();
  });
  return details;
}

/**
 * @param {HTMLDetailsElement} details
 * @param {string} title
 * @param {HTMLElement[]} entries
 */
function fill(details, title, entries) {
  details.hidden = !entries.length;
  const list = element("ul");
  list.append(...entries);
  const summary = details.querySelector("summary");
  if (!summary) details.append(element("summary", "", title), list);
  else {
    setText(summary, title);
    details.lastElementChild?.replaceWith(list);
  }
}

/** @param {Verdict["where"][number]} place */
function whereEntry({ text, code, path }) {
  const entry = element("li", "", text);
  entry.title = path;
  if (code) entry.append(element("code", "", code));
  return entry;
}

/**
 * @param {HTMLElement} target
 * @param {string} text
 */
function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** @param {number} share */
function percent(share) {
  return `${(100 * share).toFixed(2)}%`;
}
