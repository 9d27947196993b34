// Requests of the explorer's controls, received in order. Each says which one precedes it; the kernel takes none before
// its predecessor, and reports the latest that it has taken. What was lost on the way is sent again with all that follow:
// controls and picture cannot disagree for good.

/** @typedef {import("./types").ExplorerState} ExplorerState */
/** @typedef {import("./types").KnobRow} KnobRow */
/** @typedef {Record<string, any> & { type: string, number: number, view: string }} Request */

const RESEND_MS = 1500; // a message takes a few milliseconds; a kernel that runs a cell is not asked again
const SLOWEST_MS = 12_000;

export class ExplorerRequests {
  /**
   * @param {(request: Request) => void} transmit
   * @param {string} view id of the view
   * @param {() => boolean} canSend whether the kernel would read a message now
   */
  constructor(transmit, view, canSend) {
    this.transmit = transmit;
    this.view = view;
    this.canSend = canSend;
    this.number = 0;
    /** @type {Request[]} sent in this order, and not received as far as is known */
    this.unreceived = [];
    /** @type {ExplorerState | null} */
    this.state = null;
    this.delay = RESEND_MS;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.timer = undefined;
  }

  /** @param {Record<string, any> & { type: string }} request */
  send(request) {
    this.number += 1;
    const numbered = { ...request, number: this.number, view: this.view };
    // Of the values of one drag, or of one text, only the last matters.
    if (isReplaced(this.unreceived.at(-1), numbered)) this.unreceived.pop();
    this.unreceived.push(numbered);
    this.delay = RESEND_MS;
    this.transmitFrom(this.unreceived.length - 1);
    this.schedule();
  }

  /** @param {ExplorerState} state */
  receive(state) {
    this.state = state;
    const received = state.received[this.view] ?? 0;
    this.unreceived = this.unreceived.filter(({ number }) => number > received);
    if (!this.unreceived.length) this.close();
  }

  schedule() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.resend(), this.delay);
  }

  /** Send again, in order, what the kernel has not received. */
  resend() {
    if (!this.unreceived.length) return;
    if (this.canSend()) {
      this.transmitFrom(0);
      this.delay = Math.min(2 * this.delay, SLOWEST_MS);
    }
    this.schedule();
  }

  /**
   * Transmit the unreceived requests from a place on, each with the number of the one before it: 0 for the first one.
   * @param {number} start
   */
  transmitFrom(start) {
    for (let place = start; place < this.unreceived.length; place += 1) {
      this.transmit({ ...this.unreceived[place], after: this.unreceived[place - 1]?.number ?? 0 });
    }
  }

  /**
   * Return a knob as the user has set it, before the kernel has received it.
   * @param {KnobRow} knob
   * @returns {KnobRow}
   */
  withRequested(knob) {
    const own = this.unreceived.filter(({ type, field }) => type === "knob" && field === knob.field).at(-1);
    if (!own) return knob;
    return { ...knob, index: own.index ?? knob.index, value: own.value ?? knob.value, problem: "" };
  }

  /** Whether the picture is of another setting than the controls. */
  get isWaiting() {
    const { state } = this;
    return this.unreceived.length > 0 || (state !== null && (state.working || state.wanted !== state.shown));
  }

  /** Whether the kernel has said that it runs a setting or a search. */
  get isRunning() {
    const { state } = this;
    return state !== null && (state.working || state.wanted !== state.shown || state.search.state === "running");
  }

  close() {
    clearTimeout(this.timer);
  }
}

/**
 * @param {Request | undefined} earlier
 * @param {Request} later
 */
function isReplaced(earlier, later) {
  return later.type === "knob" && earlier?.type === "knob" && earlier.field === later.field && earlier.drag === later.drag;
}
