// Asynchronous tasks run one after the other: drawings of plotly and unpacking must not overlap.

export class TaskQueue {
  /**
   * @param {() => void} onChange called when a task is added and when it has ended
   * @param {(error: unknown) => void} onError
   */
  constructor(onChange, onError) {
    this.onChange = onChange;
    this.onError = onError;
    this.pending = 0;
    this.isClosed = false;
    this.last = Promise.resolve();
  }

  /**
   * Run a task after those added before.
   * @param {() => unknown} task
   */
  add(task) {
    this.pending += 1;
    this.onChange();
    this.last = this.last
      .then(async () => {
        if (!this.isClosed) await task();
      })
      .catch(this.onError)
      .then(() => {
        this.pending -= 1;
        this.onChange();
      });
  }

  /** Skip the tasks that have not started. */
  close() {
    this.isClosed = true;
  }
}
