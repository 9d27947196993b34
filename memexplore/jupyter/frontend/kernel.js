// Whether the kernel that made a view still lives. A restarted kernel leaves a page whose requests nobody answers.

/** @typedef {"alive" | "gone"} Life */

const PING_AFTER_MS = 3000; // without an answer
const GONE_AFTER_MS = 8000; // without an answer to the ping, from a kernel that runs nothing
const ENDED = ["dead", "terminating", "restarting", "autorestarting"];
const BUSY = ["busy", "starting", "unknown"];

export class Kernel {
  /**
   * @param {import("./types").Model} model
   * @param {HTMLElement} root
   * @param {{ onGone: () => void, onBack: () => void, onIdle: () => void, isRunning: () => boolean }} handlers
   *   `isRunning` returns whether the kernel has said that it runs a setting or a search, which may take its main thread
   *   while it reports to be idle
   */
  constructor(model, root, { onGone, onBack, onIdle, isRunning }) {
    this.model = model;
    this.root = root;
    this.onGone = onGone;
    this.onBack = onBack;
    this.onIdle = onIdle;
    this.isRunning = isRunning;
    this.isGone = false;
    this.hasEnded = false; // an event says so; else the kernel has only not answered
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.timer = undefined;
    // Pages other than JupyterLab have no such connection: there a busy kernel looks like one that has ended.
    this.connection = model.widget_manager?.kernel ?? null;
    this.onComm = () => this.checkComm();
    this.onStatus = () => this.checkStatus();
    this.onVisible = () => document.visibilityState === "visible" && this.expect();
    model.on("comm_live_update", this.onComm);
    model.on("comm:close", this.onComm);
    this.connection?.statusChanged?.connect(this.onStatus);
    this.connection?.disposed?.connect(this.onStatus); // shut down, or replaced by another kernel
    document.addEventListener("visibilitychange", this.onVisible);
  }

  /** Whether the kernel runs a cell, and reads messages later. */
  get isBusy() {
    return this.connection !== null && BUSY.includes(this.connection.status ?? "");
  }

  /** Whether the kernel would read a message now. */
  get canRead() {
    return !this.isGone && !this.isBusy;
  }

  /** Expect an answer to a request that was sent now. */
  expect() {
    if (this.isGone || this.timer !== undefined) return;
    this.timer = setTimeout(() => this.ping(), PING_AFTER_MS);
  }

  /** Note that a message of the kernel has arrived: a kernel that was only late is back. */
  hear() {
    this.forget();
    if (!this.isGone || this.hasEnded) return;
    this.isGone = false;
    this.onBack();
  }

  /** Expect no answer. */
  forget() {
    clearTimeout(this.timer);
    this.timer = undefined;
  }

  /** Whether the kernel may be unable to answer for as long as it takes. */
  get mayBeLate() {
    return this.isBusy || this.isRunning();
  }

  ping() {
    this.timer = undefined;
    if (this.connection !== null && this.mayBeLate) return this.expect(); // it would read the ping afterwards
    this.model.send({ type: "ping" });
    this.timer = setTimeout(() => this.judge(), GONE_AFTER_MS);
  }

  judge() {
    this.timer = undefined;
    // Without a connection a busy kernel looks like one that has ended.
    if (this.connection === null || this.mayBeLate) this.expect();
    else this.lose();
  }

  checkComm() {
    // The event comes before ipywidgets marks the element.
    setTimeout(() => {
      if (this.root.closest(".jupyter-widgets-disconnected")) this.end();
    });
  }

  checkStatus() {
    const status = this.connection?.status ?? "";
    if (ENDED.includes(status) || this.connection?.isDisposed) this.end();
    else if (status === "idle") this.onIdle();
  }

  /** The kernel has ended for good. */
  end() {
    this.hasEnded = true;
    this.lose();
  }

  lose() {
    this.forget();
    if (this.isGone) return;
    this.isGone = true;
    this.onGone();
  }

  close() {
    this.forget();
    this.model.off("comm_live_update", this.onComm);
    this.model.off("comm:close", this.onComm);
    this.connection?.statusChanged?.disconnect(this.onStatus);
    this.connection?.disposed?.disconnect(this.onStatus);
    document.removeEventListener("visibilitychange", this.onVisible);
  }
}
