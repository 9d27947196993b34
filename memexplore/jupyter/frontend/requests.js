// Requests of one view to the kernel. All views of a widget share a comm, and every reply reaches every view: a request
// carries the id of its view and a number, which the kernel echoes. Of the requests about one topic only the latest
// matters. It is sent again if the kernel has replied to a later ping and not to it, so what is drawn and what was wanted
// cannot disagree for good; a kernel, a server or a page that is only slow gets no request twice.

/** @typedef {import("./types").Message} Message */
/** @typedef {Record<string, any> & { type: string, number: number, tape: number }} Request */
/** @typedef {{ request: Request, sentAt: number, isHeard: boolean, isSettled: boolean }} Topic */

const PING_MS = 1500; // a reply takes a few milliseconds
const SLOWEST_MS = 12_000;

export class Requests {
  /**
   * @param {(request: Record<string, unknown>) => void} transmit
   * @param {string} view id of the view
   * @param {{ canRead: () => boolean, isWorking: () => boolean }} kernel whether it would read a message now, and whether
   *   it makes a new tape, about which it sends a message to all views
   */
  constructor(transmit, view, kernel) {
    this.transmit = transmit;
    this.view = view;
    this.kernel = kernel;
    this.tape = 0; // number of the tape on the screen: the kernel ignores requests about another one
    this.number = 0;
    /** @type {Map<string, Topic>} the latest request about each topic */
    this.topics = new Map();
    this.delay = PING_MS;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.timer = undefined;
  }

  /**
   * Send a request, whose earlier replies about the same topic become stale.
   * @param {string} type
   * @param {Record<string, unknown>} [fields]
   * @param {string} [topic]
   */
  send(type, fields = {}, topic = type) {
    this.number += 1;
    const request = { ...fields, type, view: this.view, tape: this.tape, number: this.number };
    this.topics.set(topic, { request, sentAt: this.number, isHeard: false, isSettled: false });
    this.transmit(request);
    this.delay = PING_MS;
    this.schedule();
  }

  schedule() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ping(), this.delay);
  }

  get unheard() {
    return [...this.topics.values()].filter(({ isHeard, isSettled }) => !isHeard && !isSettled);
  }

  /** Ping the kernel if it has not replied to a request: it reads messages in order. */
  ping() {
    if (!this.unheard.length) return;
    if (this.kernel.canRead() && !this.kernel.isWorking()) {
      this.number += 1;
      this.transmit({ type: "ping", view: this.view, number: this.number });
      this.delay = Math.min(2 * this.delay, SLOWEST_MS);
    }
    this.schedule();
  }

  /**
   * Send again what the kernel has not replied to, although it has read a later ping.
   * @param {number} ping
   */
  resend(ping) {
    if (this.kernel.isWorking()) return;
    for (const topic of this.unheard.filter(({ sentAt }) => sentAt < ping)) {
      topic.sentAt = this.number;
      this.transmit({ ...topic.request, again: true });
    }
  }

  /**
   * Note that a message has arrived, which is drawn later.
   * @param {Message} message
   */
  hear(message) {
    if (message.type === "pong" && message.view === this.view) this.resend(message.number ?? 0);
    for (const [name, topic] of this.topics) {
      const isDetails = name === "details" && message.type === "details" && (message.tape ?? 0) >= topic.request.tape;
      if (isDetails || this.isReply(message, topic.request)) topic.isHeard = true;
    }
  }

  /**
   * @param {Message} message
   * @param {Request} request
   */
  isReply({ view, sender, number }, request) {
    return (view ?? sender) === this.view && number === request.number;
  }

  /**
   * Return whether a message is for this view: a reply to one of its requests, or a message to all views.
   * @param {Message} message
   */
  concerns(message) {
    return message.view === undefined || message.view === this.view;
  }

  /**
   * Return whether a message replies to the latest request about a topic.
   * @param {Message} message
   * @param {string} [topic]
   */
  isLatest(message, topic = message.type) {
    const latest = this.topics.get(topic);
    return latest !== undefined && this.isReply(message, latest.request);
  }

  /**
   * Note that the reply about a topic has been drawn.
   * @param {string} topic
   */
  settle(topic) {
    const latest = this.topics.get(topic);
    if (latest) latest.isSettled = true;
  }

  /** Note that no reply to an earlier request will come. */
  settleAll() {
    for (const topic of this.topics.keys()) this.settle(topic);
  }

  /** Whether a reply is still to come, or to be drawn. */
  get isWaiting() {
    return [...this.topics.values()].some(({ isSettled }) => !isSettled);
  }

  close() {
    clearTimeout(this.timer);
  }
}
