// Entry of a widget without a view, which the kernel sends to each page that connects: on a page that was opened while a
// cell runs it makes the models of a live page, and has its outputs drawn. JupyterLab itself asks the kernel for its
// models on the channel that a kernel reads after the cell. A page that has the models keeps them; with a kernel before
// ipykernel 7, which reads no other requests while a cell runs, they are connected to the control channel.

/** @typedef {import("../types").Comm} Comm */
/** @typedef {import("../types").ControlConnection} Connection */
/** @typedef {import("../types").WidgetManager} WidgetManager */
/** @typedef {Record<string, { _model_name: string, _model_module: string, _model_module_version: string }>} States */
/** @typedef {{ states: States, cell: string, view: string, outputs: unknown[], display: string, image: string }} Answer */
/**
 * @typedef {{
 *   get(name: "models"): string[],
 *   get(name: "comm"): string,
 *   get(name: "reconnects"): boolean,
 *   on(event: "msg:custom", handler: (message: Answer) => void): void,
 *   widget_manager?: WidgetManager,
 * }} Model
 */

const TARGET = "jupyter.widget";
const PATIENCE_MS = 1000; // JupyterLab makes the models of an idle kernel sooner

export default {
  /** @param {{ model: Model }} widget */
  initialize({ model }) {
    const manager = model.widget_manager;
    const connection = manager?.kernel;
    if (!manager || !connection?.sendControlMessage) return; // of pages that are not JupyterLab's
    const isMissing = () => !manager.restoredStatus && model.get("models").some((id) => !manager.has_model(id));
    if (model.get("reconnects")) for (const id of model.get("models")) reconnect(manager, connection, id);
    if (!isMissing()) return;
    model.on("msg:custom", async (answer) => {
      if (!isMissing()) return;
      await makeModels(manager, connection, answer.states);
      putOutputs(manager, answer);
      followImage(manager, connection, answer);
      manager._restored.emit();
    });
    setTimeout(() => {
      if (isMissing()) transmit(connection, model.get("comm"), { method: "custom", content: { type: "states" } });
    }, PATIENCE_MS);
  },
};

/**
 * Make models, which stay connected to the kernel through its control channel.
 * @param {WidgetManager} manager
 * @param {Connection} connection
 * @param {States} states
 */
async function makeModels(manager, connection, states) {
  // Each is registered before the next one is awaited: they refer to each other.
  const made = Object.entries(states)
    .filter(([id]) => !manager.has_model(id))
    .map(async ([id, state]) => {
      const { _model_name: name, _model_module: module, _model_module_version: version } = state;
      const comm = connect(connection, await manager._create_comm(TARGET, id), id);
      return manager.new_model({ model_name: name, model_module: module, model_module_version: version, model_id: id, comm }, state);
    });
  await Promise.all(made);
}

/**
 * Connect a model that the page has to the kernel through its control channel.
 * @param {WidgetManager} manager
 * @param {Connection} connection
 * @param {string} id
 */
async function reconnect(manager, connection, id) {
  const { comm } = manager.has_model(id) ? await manager.get_model(id) : {};
  if (comm) connect(connection, comm, id);
}

/**
 * @param {Connection} connection
 * @param {Comm} comm
 * @param {string} id
 */
function connect(connection, comm, id) {
  comm.send = (data, callbacks, metadata, buffers) => {
    const future = transmit(connection, id, data, metadata, buffers);
    comm._hookupCallbacks(future, callbacks);
    return future.msg.header.msg_id;
  };
  return comm;
}

/**
 * Put the outputs of the running cell into the notebook, whose file was written before the cell began.
 * @param {WidgetManager} manager
 * @param {Answer} answer
 */
function putOutputs(manager, { cell, view, outputs }) {
  change(manager, cell, (target) => {
    if (find(target, view) >= 0) return;
    target.outputs.clear(); // they are of an earlier run
    target.trusted = true; // as JupyterLab sets it for a cell that a person runs
    for (const output of outputs) target.outputs.add(output);
  });
}

/**
 * Replace the static image when the kernel does: JupyterLab hands this on to the page that runs the cell only.
 * @param {WidgetManager} manager
 * @param {Connection} connection
 * @param {Answer} answer
 */
function followImage(manager, connection, { cell, display, image }) {
  connection.iopubMessage.connect((_, { header, content }) => {
    if (header.msg_type !== "update_display_data" || content.transient?.display_id !== display) return;
    change(manager, cell, (target) => {
      const index = find(target, image);
      if (index >= 0) target.outputs.set(index, { output_type: "display_data", data: content.data, metadata: content.metadata });
    });
  });
}

/**
 * Change the outputs of a cell, if the page has it. The notebook does not count as changed: else two pages would write
 * its file in turns.
 * @param {WidgetManager} manager
 * @param {string} cell id
 * @param {(cell: import("../types").OutputCell) => void} act
 */
function change(manager, cell, act) {
  const notebook = manager.context?.model;
  const target = [...(notebook?.cells ?? [])].find(({ id }) => id === cell);
  if (!notebook || !target?.outputs) return;
  const { dirty } = notebook;
  act(target);
  notebook.dirty = dirty;
}

/**
 * Return the index of the output of a cell that has a text, or -1.
 * @param {import("../types").OutputCell} cell
 * @param {string} text
 */
function find({ outputs }, text) {
  return outputs.toJSON().findIndex((output) => JSON.stringify(output).includes(text));
}

/**
 * Send a message to a comm of the kernel through the control channel, which it reads while a cell runs.
 * @param {Connection} connection
 * @param {string} comm id
 * @param {unknown} data
 * @param {unknown} [metadata]
 * @param {unknown[]} [buffers]
 */
function transmit(connection, comm, data, metadata = {}, buffers = []) {
  const identity = { username: connection.username, session: connection.clientId, msg_id: uniqueId() };
  const header = { ...identity, msg_type: "comm_msg", version: "5.3", date: new Date().toISOString() };
  const content = { comm_id: comm, data };
  return connection.sendControlMessage({ header, parent_header: {}, metadata, content, buffers, channel: "control" });
}

/** `crypto.randomUUID` is missing on pages without https. */
function uniqueId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
