// Requests of one view to the kernel. All views of a widget share a comm, and every reply reaches every view: a request
// carries the id of its view and a number, which the kernel echoes.

/** @typedef {import("./types").Message} Message */

export class Requests {
  /**
   * @param {(request: Record<string, unknown>) => void} send
   * @param {string} view id of the view
   */
  constructor(send, view) {
    this.transmit = send;
    this.view = view;
    this.tape = 0; // number of the tape on the screen: the kernel ignores requests about another one
    /** @type {Map<string, { latest: number, settled: number }>} */
    this.counters = new Map();
  }

  /**
   * Send a request whose replies, if any, go to all views.
   * @param {string} type
   * @param {Record<string, unknown>} [fields]
   */
  send(type, fields = {}) {
    this.transmit({ ...fields, type, view: this.view, tape: this.tape });
  }

  /**
   * Send a request whose earlier replies become stale.
   * @param {string} type
   * @param {Record<string, unknown>} [fields]
   */
  sendNumbered(type, fields = {}) {
    const counter = this.counters.get(type) ?? { latest: 0, settled: 0 };
    counter.latest += 1;
    this.counters.set(type, counter);
    this.send(type, { ...fields, number: counter.latest });
  }

  /**
   * Return whether a message is for this view: a reply to one of its requests, or a message to all views.
   * @param {Message} message
   */
  concerns(message) {
    return message.view === undefined || message.view === this.view;
  }

  /**
   * Return whether a message replies to the latest request of its type.
   * @param {Message} message
   */
  isLatest(message) {
    return this.concerns(message) && message.number === this.counters.get(message.type)?.latest;
  }

  /**
   * Note that the latest reply of a type has been drawn.
   * @param {string} type
   */
  settle(type) {
    const counter = this.counters.get(type);
    if (counter) counter.settled = counter.latest;
  }

  /** Note that no reply to an earlier request will come. */
  settleAll() {
    for (const type of this.counters.keys()) this.settle(type);
  }

  /** Whether a reply is still to come, or to be drawn. */
  get isWaiting() {
    return [...this.counters.values()].some(({ latest, settled }) => settled < latest);
  }
}
