// The text above the timeline: summary, out-of-memory error, notes and problems.
import { element } from "./dom.js";

const WAITING = "Waiting for the kernel. Until it answers, this is a static image.";

export class Summary {
  constructor() {
    // Spaces keep the height of the lines until they have text.
    this.sentence = element("p", "sentence", "\u00a0");
    this.fits = element("p", "fits", "\u00a0");
    this.oom = element("p", "oom");
    this.notes = element("details", "notes");
    this.notes.hidden = true;
    this.problem = element("p", "problem");
    this.problem.setAttribute("role", "alert");
    this.elements = [this.sentence, this.fits, this.oom, this.notes, this.problem, element("p", "waiting", WAITING)];
  }

  /** @param {import("./types").TapeContent} content */
  draw({ sentence, oom, notes }) {
    [this.sentence.textContent, this.fits.textContent] = sentence;
    this.oom.textContent = oom;
    this.problem.textContent = "";
    this.notes.hidden = !notes.length;
    const list = element("ul");
    list.append(...notes.map((note) => element("li", "", note)));
    this.notes.replaceChildren(element("summary", "", titleOfNotes(notes)), list);
  }

  /** @param {unknown} error */
  showProblem(error) {
    this.problem.textContent = error instanceof Error ? error.message : String(error);
  }
}

/**
 * The number of notes, as assumptions if all of them are.
 * @param {string[]} notes
 */
export function titleOfNotes(notes) {
  const kind = notes.every((note) => note.startsWith("assumed: ")) ? "assumption" : "note";
  return `${notes.length} ${kind}${notes.length === 1 ? "" : "s"}`;
}
