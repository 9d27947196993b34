// Status messages for screen readers.
import { element } from "./dom.js";

/** An invisible element whose changes are read aloud when the user is idle (ARIA role `status`). */
export class LiveRegion {
  constructor() {
    this.root = element("div", "live");
    this.root.setAttribute("role", "status");
    this.root.setAttribute("aria-live", "polite");
  }

  /** @param {string} text */
  announce(text) {
    if (this.root.textContent !== text) this.root.textContent = text;
  }
}
