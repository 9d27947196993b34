// Pictures of settings that were on the screen: one that is chosen again is drawn before the kernel has answered. What
// the kernel then sends decides: the same picture is not drawn again, another one replaces it.

/** @typedef {import("./types").ExplorerState} ExplorerState */
/** @typedef {import("./types").TapeContent} TapeContent */
/** @typedef {{ content: TapeContent, buffers: DataView[] }} Picture */

const KEPT = 64; // of some hundred kB each

export class SeenSettings {
  /**
   * @param {import("./explorer_requests.js").ExplorerRequests} requests
   * @param {{
   *   isZoomed: () => boolean,
   *   selection: () => string | null,
   *   enqueue: (task: () => unknown) => void,
   *   draw: (content: TapeContent) => unknown,
   *   answer: (content: TapeContent, early: TapeContent | undefined) => unknown,
   * }} view whether its pictures show a part of the run, and the layer that is highlighted in them. `draw` is called before
   *   the kernel has answered, `answer` with what the kernel then sends, and with what was drawn if that is the same
   */
  constructor(requests, view) {
    this.requests = requests;
    this.view = view;
    /** @type {Map<string, Picture>} by setting; of the present axis, width and baseline */
    this.kept = new Map();
    /** @type {Picture | null} from the latest message of the kernel */
    this.latest = null;
    /** @type {Picture | null} drawn before the kernel has answered */
    this.early = null;
  }

  /**
   * Draw the setting that a request has chosen, if it was on the screen before.
   * @param {string} type
   */
  request(type) {
    if (type === "pin" || type === "unpin") this.clear();
    if (type !== "knob" || !this.wanted) return;
    this.view.enqueue(() => {
      const { wanted } = this; // later requests may have chosen another setting
      if (!wanted || !this.requests.isWaiting) return undefined;
      this.early = wanted;
      return this.view.draw(wanted.content);
    });
  }

  /** The picture of the setting that the controls show; undefined if it was not on the screen. */
  get wanted() {
    const { state } = this.requests;
    return state && !this.view.isZoomed() ? this.kept.get(this.key(state)) : undefined;
  }

  /**
   * Note the picture of a message, and return whether to draw it now. While a picture is on the screen that the kernel has
   * not answered, messages may be about settings before it.
   * @param {TapeContent} content
   * @param {DataView[]} buffers
   */
  arrive(content, buffers) {
    this.latest = { content, buffers };
    return this.early === null;
  }

  /**
   * Note that a state of the kernel has arrived: where it is about the setting that the controls show, the latest picture
   * is that of the setting.
   * @param {number} tape number of the tape that the state is about
   */
  async receive(tape) {
    const { early, latest } = this;
    const { state } = this.requests;
    if (!latest || !state || this.requests.isWaiting || latest.content.tape !== tape) return;
    this.early = null;
    if (!this.view.isZoomed()) this.keep(this.key(state), latest);
    if (!early) return;
    await this.view.answer(latest.content, isEqual(early.buffers, latest.buffers) ? early.content : undefined);
  }

  /** Forget all pictures: those of the next messages have another axis, width or baseline. */
  clear() {
    this.kept.clear();
  }

  /**
   * @param {string} key
   * @param {Picture} picture
   */
  keep(key, picture) {
    this.kept.delete(key);
    this.kept.set(key, picture);
    for (const oldest of this.kept.keys()) {
      if (this.kept.size <= KEPT) break;
      this.kept.delete(oldest);
    }
  }

  /** @param {ExplorerState} state */
  key({ knobs, changes }) {
    const values = knobs.map((knob) => {
      const { kind, value, options, index } = this.requests.withRequested(knob);
      return kind === "text" ? value : options[index];
    });
    // Fields without a control are listed among the changes only.
    const others = changes.filter(({ field }) => !knobs.some((knob) => knob.field === field));
    return JSON.stringify([values, others, this.view.selection()]);
  }
}

/**
 * @param {DataView[]} one
 * @param {DataView[]} other
 */
function isEqual(one, other) {
  return one.length === other.length && one.every((buffer, place) => hasSameBytes(buffer, other[place]));
}

/**
 * @param {DataView} one
 * @param {DataView} other
 */
function hasSameBytes(one, other) {
  if (one.byteLength !== other.byteLength) return false;
  const [bytes, others] = [one, other].map((view) => new Uint8Array(view.buffer, view.byteOffset, view.byteLength));
  return bytes.every((byte, place) => byte === others[place]);
}
