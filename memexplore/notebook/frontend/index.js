// Entry of the widget for anywidget.
import { View } from "./view.js";

export default {
  /** @param {{ model: import("./types").Model, el: HTMLElement }} widget */
  render({ model, el }) {
    const view = new View(model, el);
    return () => view.close();
  },
};
