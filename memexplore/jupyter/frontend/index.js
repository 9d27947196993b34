// Entry of the widget for anywidget.
import { receiveMessages } from "./messages.js";
import { View } from "./view.js";

export default {
  /** @param {{ model: import("./types").Model }} widget */
  initialize({ model }) {
    void receiveMessages(model);
  },
  /** @param {{ model: import("./types").Model, el: HTMLElement }} widget */
  render({ model, el }) {
    const view = new View(model, el);
    return () => view.close();
  },
};
