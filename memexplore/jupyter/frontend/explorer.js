// The explorer's part of the page: changes, knobs, search and the actions on a layer, from one state of the kernel.
import { Changes } from "./changes.js";
import { element } from "./dom.js";
import { ExplorerRequests } from "./explorer_requests.js";
import { Knobs } from "./knobs.js";
import { Search } from "./search.js";

/** @typedef {import("./types").ExplorerState} ExplorerState */

const FRAME_MS = 100; // pages in the background draw no frames

export class Explorer {
  /**
   * @param {import("./requests.js").Requests} requests
   * @param {import("./kernel.js").Kernel} kernel
   * @param {import("./layer_actions.js").LayerActions} actions
   * @param {{ onBusy: () => void, onRequest: (type: string) => void, onState: (state: ExplorerState) => void }} handlers
   */
  constructor(requests, kernel, actions, { onBusy, onRequest, onState }) {
    this.kernel = kernel;
    this.onBusy = onBusy;
    this.onRequest = onRequest;
    this.onState = onState;
    this.actions = actions;
    this.requests = new ExplorerRequests(requests.transmit, requests.view, () => kernel.canRead);
    this.changes = new Changes((request) => this.send(request));
    this.knobs = new Knobs((request) => this.send(request));
    this.search = new Search((request) => this.send(request));
    this.root = element("div", "explorer");
    this.root.append(this.changes.root, this.knobs.root);
    this.running = element("div", "running", "Running…");
    for (const part of [this.root, this.search.root]) part.hidden = true; // a view may have no explorer
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.frame = undefined;
  }

  /** @param {Record<string, any> & { type: string }} request */
  send(request) {
    if (this.kernel.isGone || !this.requests.state) return; // a view may have no explorer
    this.requests.send(request);
    this.kernel.expect();
    this.onRequest(request.type);
    this.onBusy();
  }

  /** @param {ExplorerState} state */
  receive(state) {
    this.requests.receive(state);
    this.onBusy();
    this.schedule();
  }

  /** Draw the newest state in the next frame: of several states in one frame only the last. */
  schedule() {
    if (this.frame !== undefined) return;
    const draw = () => {
      if (this.frame === undefined) return;
      clearTimeout(this.frame);
      this.frame = undefined;
      this.draw();
    };
    this.frame = setTimeout(draw, FRAME_MS);
    requestAnimationFrame(draw);
  }

  draw() {
    const { state } = this.requests;
    if (!state) return;
    for (const part of [this.root, this.search.root]) part.hidden = false;
    this.changes.draw(state);
    this.running.textContent = runningText(state);
    this.knobs.draw(state, (knob) => this.requests.withRequested(knob));
    this.search.draw(state.search);
    this.actions.drawActions(state.layer);
    this.onState(state);
    this.onBusy();
  }

  /** Whether the kernel has said that it runs a setting or a search. */
  get isRunning() {
    return this.requests.isRunning;
  }

  /** Whether the picture is that of a setting before its run. */
  get isExpected() {
    return this.requests.state?.expected ?? false;
  }

  get isWaiting() {
    return this.requests.isWaiting || this.frame !== undefined;
  }

  /**
   * Make all controls unusable while the kernel that runs the settings is gone, and usable again.
   * @param {boolean} isGone
   */
  setGone(isGone) {
    for (const part of [this.changes.root, this.knobs.root, this.knobs.gpu, this.search.root]) part.inert = isGone;
    if (isGone) this.requests.close();
    else this.requests.schedule();
  }

  close() {
    clearTimeout(this.frame);
    this.frame = undefined;
    this.search.close();
    this.requests.close();
  }
}

/**
 * Return what the kernel runs, or what it will run after the cell that it runs now.
 * @param {Pick<ExplorerState, "changes" | "working" | "expected">} state
 */
export function runningText({ changes, working, expected }) {
  const setting = changes.map(({ text }) => text).join(", ") || "the step as written";
  if (working && expected) return `Expected. Running ${setting}…`;
  return working ? `Running ${setting}…` : `Waiting for the kernel: ${setting}`;
}
