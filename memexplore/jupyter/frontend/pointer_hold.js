// Postpones drawing while a pointer is held down on a graph: a new drawing would end the drag.

export class PointerHold {
  /**
   * @param {HTMLElement} graph
   * @param {(task: () => unknown) => void} enqueue receives the postponed tasks
   */
  constructor(graph, enqueue) {
    this.enqueue = enqueue;
    /** @type {(() => unknown)[] | null} */
    this.postponed = null;
    this.press = () => void (this.postponed ??= []);
    this.release = () => {
      const tasks = this.postponed ?? [];
      this.postponed = null;
      // plotly's own handlers of the release run first.
      setTimeout(() => tasks.forEach((task) => this.enqueue(task)));
    };
    graph.addEventListener("pointerdown", this.press, true);
    for (const event of ["pointerup", "pointercancel"]) window.addEventListener(event, this.release);
  }

  /**
   * Run a task now, or after the pointer is released.
   * @param {() => unknown} task
   */
  run(task) {
    if (!this.postponed) return task();
    this.postponed.push(task);
    return undefined;
  }

  close() {
    for (const event of ["pointerup", "pointercancel"]) window.removeEventListener(event, this.release);
  }
}
