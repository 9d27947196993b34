// Requests of the explorer's controls. The kernel reports the number of the latest one that it has received: what was
// lost on the way is sent again, so that controls and picture cannot disagree for good.

/** @typedef {import("./types").ExplorerState} ExplorerState */
/** @typedef {import("./types").KnobRow} KnobRow */
/** @typedef {Record<string, any> & { type: string, number: number }} Request */

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
    /** @type {Request[]} sent, and not received as far as is known */
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
    this.unreceived = this.unreceived.filter((earlier) => !isReplaced(earlier, numbered));
    this.unreceived.push(numbered);
    this.delay = RESEND_MS;
    this.transmit(numbered);
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
      for (const request of this.unreceived) this.transmit(request);
      this.delay = Math.min(2 * this.delay, SLOWEST_MS);
    }
    this.schedule();
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

  close() {
    clearTimeout(this.timer);
  }
}

/**
 * @param {Request} earlier
 * @param {Request} later
 */
function isReplaced(earlier, later) {
  return later.type === "knob" && earlier.type === "knob" && earlier.field === later.field && earlier.drag === later.drag;
}
