// The part of a page about a watched run: a bar with its state, which steps are shown, and the history of all steps.
import { element } from "./dom.js";
import { History } from "./history.js";
import { LiveSteps } from "./live_data.js";
import { barShares } from "./verdict.js";

/** @typedef {import("./types").LiveState} LiveState */
/** @typedef {(request: Record<string, unknown> & { type: string }) => void} Send */

const MARKS = { watching: "●", paused: "❚❚", ended: "■", failed: "✗" };

export class LiveRun {
  /**
   * @param {import("./chart.js").Context} context
   * @param {Send} send
   * @param {{
   *   onLine: (line: string) => void,
   *   onKnobs: (state: import("./types").ExplorerState) => void,
   *   onOutline: (name: string) => void,
   *   enqueue: (task: () => unknown) => void,
   * }} handlers `onLine` is called with the `file:line` of a leak, `onKnobs` with a new state of the knobs, `onOutline` with
   *   the name of what the outline shows
   */
  constructor(context, send, { onLine, onKnobs, onOutline, enqueue }) {
    this.context = context;
    this.send = send;
    this.onKnobs = onKnobs;
    this.onOutline = onOutline;
    this.enqueue = enqueue;
    this.steps = new LiveSteps();
    /** @type {LiveState | null} */
    this.state = null;
    this.isQueued = false; // whether a drawing of the newest state is to come
    this.asksForHolders = true;
    this.root = element("div", "run");
    this.root.hidden = true;
    this.mark = element("span", "mark");
    this.mark.setAttribute("aria-hidden", "true");
    this.title = element("b", "run-title");
    this.headline = element("span", "run-headline");
    this.cost = element("span", "run-cost");
    this.peak = element("span", "run-peak");
    this.memory = element("span", "run-memory");
    this.worst = element("span", "run-worst");
    this.bar = capacityBar();
    this.pause = action("Pause", () => this.send({ type: this.state?.wants_pause ? "live resume" : "live pause" }));
    this.fold = action("", () => this.send({ type: "live form", form: this.state?.form === "line" ? "page" : "line" }));
    this.fold.classList.add("memexplore-run-fold");
    this.pin = action("Pin", () => this.send({ type: "live pin" }));
    this.newest = action("Newest step", () => this.send({ type: "live newest" }));
    this.leak = new LeakLine({
      onShow: (line) => onLine(line),
      onIgnore: () => this.send({ type: "live ignore" }),
    });
    this.error = element("p", "problem");
    this.notes = element("p", "run-notes");
    const first = line("run-first", this.fold, this.mark, this.title, this.headline, this.cost, this.pause);
    const second = line("run-second", this.peak, this.bar.root, this.worst);
    this.root.append(first, second, this.memory, this.leak.root, this.error, this.notes);
    this.place = line("run-place", (this.which = element("span", "run-which")), this.pin, this.newest);
    this.place.hidden = true;
    this.history = new History(context, {
      onStep: (step) => this.send({ type: "live step", step }),
      onCompare: (start, end) => this.send({ type: "live compare", first: start, last: end }),
    });
  }

  /** Report to the kernel whether the page is seen: it sends no steps to a page that is not. */
  watchVisibility() {
    const { root } = this.context;
    let isIntersecting = true;
    let isSeen = true;
    const report = () => {
      const now = isIntersecting && document.visibilityState === "visible";
      if (now !== isSeen) this.send({ type: "live visible", visible: (isSeen = now) });
    };
    const observer = new IntersectionObserver((entries) => {
      isIntersecting = entries.at(-1)?.isIntersecting ?? true;
      report();
    });
    observer.observe(root);
    document.addEventListener("visibilitychange", report);
    this.close = () => {
      observer.disconnect();
      document.removeEventListener("visibilitychange", report);
      this.send({ type: "live visible", visible: false });
    };
  }

  close() {}

  /**
   * Take a message; of several that arrive before they can be drawn only the newest state is drawn.
   * @param {LiveState} state
   */
  receive(state) {
    if (!this.state) this.watchVisibility();
    this.state = { ...state, template: state.template ?? this.state?.template };
    if (state.explorer) this.onKnobs(state.explorer);
    this.steps.take(state);
    if (!this.steps.isComplete) {
      this.steps.isComplete = true; // asked for once
      this.send({ type: "live everything" });
    }
    this.schedule();
  }

  schedule() {
    if (this.isQueued || !this.context.plotly) return;
    this.isQueued = true;
    this.enqueue(async () => {
      this.isQueued = false;
      await this.draw();
    });
  }

  async draw() {
    const { state } = this;
    if (!state) return;
    this.context.root.classList.add("memexplore-watched");
    const isLine = state.form === "line";
    this.context.root.classList.toggle("memexplore-one-line", isLine);
    setText(this.fold, isLine ? "▸" : "▾");
    this.fold.setAttribute("aria-expanded", String(!isLine));
    this.fold.setAttribute("aria-label", isLine ? "Show the whole page of the run" : "Show the run as one line");
    for (const part of [this.root, this.place, this.history.root]) part.hidden = false;
    this.root.dataset.level = state.level;
    this.root.dataset.state = state.state;
    setText(this.mark, MARKS[state.state]);
    setText(this.title, state.title);
    setText(this.headline, state.headline);
    setText(this.cost, state.cost);
    setText(this.peak, state.peak);
    setText(this.memory, state.memory);
    setText(this.worst, state.worst);
    setText(this.error, state.error);
    setText(this.notes, state.notes.join(" "));
    setText(this.which, state.steps_text);
    if (state.before !== null) this.onOutline(`step ${state.before.toLocaleString("en")}`);
    this.bar.draw(state);
    this.leak.draw(state.leak);
    const isOver = state.state === "ended" || state.state === "failed";
    this.pause.hidden = isOver;
    this.context.root.classList.toggle("memexplore-over", isOver); // the model is as it was: no knob acts any more
    setText(this.pause, state.wants_pause ? "Resume" : "Pause");
    this.pin.disabled = state.shown === null;
    setText(this.pin, state.pinned === null ? "Pin" : "Unpin");
    this.newest.hidden = state.follows;
    if (state.leak && this.asksForHolders) {
      this.asksForHolders = false;
      this.send({ type: "live holders" });
    }
    if (!isLine) await this.history.drawSteps(state, this.steps);
  }
}

/** The sentence about a leak, with its line of code and who holds its tensors. */
class LeakLine {
  /** @param {{ onShow: (line: string) => void, onIgnore: () => void }} handlers */
  constructor({ onShow, onIgnore }) {
    this.line = "";
    this.root = element("div", "run-leak");
    this.root.setAttribute("role", "status");
    this.text = element("span");
    this.held = element("span", "run-held");
    this.show = action("Show", () => onShow(this.line));
    this.root.append(this.text, this.show, action("Ignore", onIgnore), this.held);
    this.root.hidden = true;
  }

  /** @param {LiveState["leak"]} leak */
  draw(leak) {
    this.root.hidden = leak === null;
    if (!leak) return;
    this.line = leak.line;
    setText(this.text, leak.text);
    setText(this.held, leak.held_by.length ? `held by ${leak.held_by.join(", ")}` : "");
    this.show.hidden = !leak.line;
  }
}

/** A bar of the newest peak and the highest one against the capacity. */
function capacityBar() {
  const root = element("div", "capacity");
  root.setAttribute("role", "img");
  const [within, beyond, limit, highest] = ["within", "beyond", "limit", "highest"].map((name) => element("span", name));
  root.append(within, beyond, highest, limit);
  return {
    root,
    /** @param {LiveState} state */
    draw({ used, highest: most, capacity, peak }) {
      root.hidden = capacity === null;
      if (capacity === null) return;
      const end = Math.max(capacity, most, used);
      const shares = barShares({ used, needed: most, capacity });
      within.style.width = percent(Math.min(used, capacity) / end);
      beyond.style.width = percent(shares.beyond);
      highest.style.left = percent(Math.min(most, end) / end);
      limit.style.left = percent(capacity / end);
      root.setAttribute("aria-label", peak);
    },
  };
}

/**
 * @param {string} text
 * @param {() => void} onClick
 */
function action(text, onClick) {
  const button = element("button", "action", text);
  button.type = "button";
  button.addEventListener("click", onClick);
  return button;
}

/**
 * @param {string} name
 * @param {HTMLElement[]} parts
 */
function line(name, ...parts) {
  const created = element("div", name);
  created.append(...parts);
  return created;
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
