// Messages to a model that took long to initialize, which anywidget 0.11 would drop.
//
// Its model waits for the widget's module before it handles a message, and gives up for good after 2 s: on a page that
// was busy for so long, the view would be drawn and never get a message. ipywidgets' own handler needs no such wait.

/** @typedef {{ comm?: import("./types").Comm }} RawModel */
/** @typedef {(message: unknown) => unknown} Handler */

/**
 * Have messages to a model handled as ipywidgets does, from now on.
 * @param {import("./types").Model} model
 */
export async function receiveMessages(model) {
  const raw = await model.widget_manager?.get_model?.(model.get("comm_id"));
  const handle = raw && ownHandler(raw);
  if (handle) raw.comm?.on_msg?.((message) => handle.call(raw, message));
}

/**
 * Return the method of the base class of a model: the last one in the chain of its prototypes.
 * @param {RawModel} raw
 * @returns {Handler | undefined}
 */
export function ownHandler(raw) {
  let handler;
  for (let each = raw; each; each = Object.getPrototypeOf(each)) {
    if (Object.hasOwn(each, "_handle_comm_msg")) handler = /** @type {any} */ (each)._handle_comm_msg;
  }
  return handler;
}
