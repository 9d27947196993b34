// Draws a Tape. Figures and tables come from the kernel, ready to be drawn, whenever they are needed: nothing is computed
// here, and nothing is kept but what is on the screen.

const PATIENCE = 1500; // ms without an answer until the static picture is shown instead
const SETTLED = 150; // ms without a further zoom until the kernel is asked for the window
// Buttons are listed one by one: among plotly's own is one that uploads the chart.
// Two clicks within 600 ms are a double click: plotly's own 300 ms are too short on a busy machine.
const CONFIG = { displaylogo: false, responsive: false, doubleClick: false, doubleClickDelay: 600 };

// All notebooks of a page share one plotly.js, by version.
const libraries = (globalThis.__memexplore ??= new Map());

function library(version) {
  if (!libraries.has(version)) libraries.set(version, { Plotly: null, asked: -Infinity, waiting: [] });
  return libraries.get(version);
}

async function unzip(buffer) {
  const stream = new Blob([buffer]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function plotly(model, isAlive) {
  const shared = library(model.get("plotly"));
  while (!shared.Plotly && isAlive()) {
    // Whoever asked may be gone before the answer came.
    if (Date.now() - shared.asked > 30_000) {
      shared.asked = Date.now();
      model.send({ ask: "plotly" });
    }
    await new Promise((done) => {
      shared.waiting.push(done);
      setTimeout(done, 1000);
    });
  }
  return shared.Plotly;
}

async function takePlotly(version, buffer) {
  const shared = library(version);
  if (shared.Plotly) return;
  // The bundle writes itself into `window.Plotly`, where JupyterLab's own plotly renderer may keep another version.
  const before = Object.getOwnPropertyDescriptor(globalThis, "Plotly");
  const url = URL.createObjectURL(new Blob([await unzip(buffer)], { type: "text/javascript" }));
  try {
    await import(url);
    shared.Plotly = globalThis.Plotly;
  } finally {
    URL.revokeObjectURL(url);
    if (before) Object.defineProperty(globalThis, "Plotly", before);
    else delete globalThis.Plotly;
  }
  shared.waiting.splice(0).forEach((done) => done());
}

function element(tag, name, text = "") {
  const made = document.createElement(tag);
  if (name) made.className = `memexplore-${name}`;
  made.textContent = text;
  return made;
}

// A figure says nothing about the page it is drawn on: text, and what lies below it, is the page's.
function themed(layout, root) {
  const { color } = getComputedStyle(root);
  return { ...layout, font: { ...layout.font, color }, modebar: { bgcolor: "rgba(0,0,0,0)", color: "#888888", activecolor: color } };
}

function whenThemeChanges(action) {
  const observer = new MutationObserver(action);
  // JupyterLab and Notebook set the first two on the body, VS Code the others.
  const attributeFilter = ["data-jp-theme-light", "data-jp-theme-name", "data-vscode-theme-kind", "class"];
  observer.observe(document.body, { attributes: true, attributeFilter });
  return () => observer.disconnect();
}

class Page {
  constructor(model, el) {
    this.model = model;
    this.root = el;
    this.alive = true;
    this.window = null; // first and last row on the screen, null for all
    this.number = 0; // of the last question for a window: older answers are stale
    this.row = -1;
    this.early = []; // what was told before there was anything to draw on
    this.queue = Promise.resolve();
    this.pending = 0; // things to be done in their turn
    this.settling = null; // the timer of a zoom that has just been made
    [this.answered, this.blocksAsked, this.mapped] = [0, 0, 0]; // numbers of questions
    this.held = null; // while the mouse is held down on the timeline: what to do when it is let go
    this.build();
    this.cleanups = [whenThemeChanges(() => this.later(() => this.recolour())), this.watchMouse()];
    const observer = new ResizeObserver(() => this.later(() => this.resize()));
    observer.observe(this.root);
    this.cleanups.push(() => observer.disconnect());
    const listen = (message, buffers) => this.later(() => this.take(message, buffers));
    model.on("msg:custom", listen);
    this.cleanups.push(() => model.off("msg:custom", listen));
    this.late = setTimeout(() => this.root.classList.add("memexplore-late"), PATIENCE);
    this.asked = this.size(this.timeline).width; // the width that the labels were chosen for
    model.send({ ask: "everything", width: this.asked });
  }

  // One thing after the other: plotly's drawing is asynchronous, and so is unpacking.
  later(action) {
    this.pending += 1;
    this.busy();
    const done = () => {
      this.pending -= 1;
      this.busy();
    };
    this.queue = this.queue.then(() => this.alive && action()).catch((error) => this.complain(error)).then(done);
  }

  // Whether the picture is still going to change by itself: read aloud by screen readers, and waited for by tests.
  busy() {
    const waits = this.pending > 0 || this.settling !== null || this.answered < this.number || this.mapped < this.blocksAsked;
    this.root.setAttribute("aria-busy", String(waits));
  }

  // To draw the timeline anew in the middle of a drag would end it.
  watchMouse() {
    const press = () => (this.held ??= []);
    const release = () => {
      const waiting = this.held ?? [];
      this.held = null;
      // plotly's own handlers of the release come first.
      setTimeout(() => waiting.forEach((action) => this.later(action)));
    };
    this.timeline.addEventListener("pointerdown", press, true);
    window.addEventListener("pointerup", release);
    window.addEventListener("pointercancel", release);
    return () => {
      window.removeEventListener("pointerup", release);
      window.removeEventListener("pointercancel", release);
    };
  }

  unlessHeld(action) {
    if (this.held) this.held.push(action);
    else return action();
  }

  complain(error) {
    this.problem.textContent = String(error?.message ?? error);
    console.error(error);
  }

  build() {
    this.root.classList.add("memexplore");
    this.sentence = element("p", "sentence", "\u00a0");
    this.fits = element("p", "fits", "\u00a0");
    this.notes = element("details", "notes");
    this.notes.hidden = true;
    this.problem = element("p", "problem");
    this.oom = element("p", "oom");
    this.waiting = element("p", "waiting", "Waiting for the kernel. Until it answers, this is a still picture.");
    this.timeline = element("div", "timeline");
    this.timeline.style.height = `${this.model.get("height")}px`;
    this.timeline.tabIndex = 0;
    this.timeline.setAttribute("aria-label", "Timeline of allocated memory; left and right arrow move the cursor");
    this.timeline.addEventListener("keydown", (event) => this.key(event));
    this.tabs = element("div", "tabs");
    this.tabs.setAttribute("role", "tablist");
    this.panels = {};
    for (const name of ["Layers", "Tensors", "Lines", "Blocks", "Growth"]) this.panels[name] = element("div", "panel");
    this.buttons = {};
    for (const [name, panel] of Object.entries(this.panels)) {
      const tab = element("button", "", name);
      tab.setAttribute("role", "tab");
      tab.addEventListener("click", () => this.open(name));
      this.buttons[name] = tab;
      this.tabs.append(tab);
      panel.setAttribute("role", "tabpanel");
      panel.setAttribute("aria-label", name);
    }
    this.chip = element("button", "chip");
    this.chip.hidden = true;
    this.chip.addEventListener("click", () => this.model.send({ ask: "select", box: null }));
    this.tabs.append(this.chip);
    this.bar = element("div", "bar");
    this.layers = element("div", "layers");
    this.panels.Layers.append(this.bar, this.layers);
    this.moment = element("p", "moment");
    this.table = element("table", "tensors");
    this.panels.Tensors.append(this.table);
    this.lines = element("table", "lines");
    this.panels.Lines.append(this.lines);
    this.gaps = element("p", "gaps");
    this.blocks = element("div", "blocks");
    this.panels.Blocks.append(this.gaps, this.blocks);
    this.grew = element("p", "grew");
    this.growth = element("table", "growth");
    this.panels.Growth.append(this.grew, this.growth);
    this.root.append(this.sentence, this.fits, this.oom, this.notes, this.problem, this.waiting);
    this.root.append(this.timeline, this.tabs, this.moment);
    this.root.append(...Object.values(this.panels));
    this.open("Layers");
  }

  open(name) {
    for (const tab of this.tabs.querySelectorAll("[role=tab]"))
      tab.setAttribute("aria-selected", String(tab.textContent === name));
    for (const [key, panel] of Object.entries(this.panels)) panel.hidden = key !== name;
    this.moment.hidden = name === "Layers" || name === "Growth";
    if (name === "Blocks") this.askBlocks();
    this.later(() => this.resize());
  }

  async take(message, buffers) {
    const { answer } = message;
    if (answer === "error") return this.complain(message.text);
    if (answer === "plotly") return takePlotly(this.model.get("plotly"), buffers[0]);
    const content = JSON.parse(await unzip(buffers[0]));
    if (answer === "everything") return this.drawEverything(content);
    if (!this.Plotly) this.early.push([answer, content]);
    else return this.follow(answer, content);
  }

  async follow(answer, content) {
    if (answer === "moment") return this.showMoment(content);
    if (answer === "selection") return this.showSelection(content.layer);
    if (answer === "timeline" && content.number === this.number) {
      await this.unlessHeld(() => content.number === this.number && this.drawTimeline(content.timeline));
      this.answered = content.number;
    }
    if (answer === "blocks" && content.number === this.blocksAsked) {
      await this.drawBlocks(content);
      this.mapped = content.number;
    }
  }

  drawEverything(content) {
    if (this.started) return; // another view of the same widget has asked
    this.started = true;
    this.early = [];
    // plotly.js may come in a message that waits behind this one.
    plotly(this.model, () => this.alive).then((Plotly) => this.later(() => this.drawFirst(Plotly, content)));
  }

  async drawFirst(Plotly, content) {
    this.Plotly = Plotly;
    [this.sentence.textContent, this.fits.textContent] = content.sentence;
    this.oom.textContent = content.oom;
    this.showGrowth(content.growth);
    this.open(content.tab);
    this.notes.hidden = !content.notes.length;
    const summary = element("summary", "", content.notes.length === 1 ? "1 assumption" : `${content.notes.length} assumptions`);
    const list = element("ul", "");
    list.append(...content.notes.map((note) => element("li", "", note)));
    this.notes.replaceChildren(summary, list);
    clearTimeout(this.late);
    this.root.classList.remove("memexplore-late");
    this.root.classList.add("memexplore-drawn");
    this.cleanups.push(hidePicture(this.model.get("picture")));
    this.row = content.row;
    await this.drawTimeline(content.timeline);
    await this.drawLayers(content.layers);
    await this.showMoment(content);
    this.showChip(content.selection);
    this.timeline.on("plotly_relayout", (change) => this.zoomed(change));
    this.timeline.on("plotly_doubleclick", () => this.show(null));
    this.timeline.on("plotly_click", ({ points }) => this.model.send({ ask: "cursor", row: points[0].x }));
    this.layers.on("plotly_icicleclick", ({ points }) => this.model.send({ ask: "select", box: points[0].id }));
    for (const [answer, told] of this.early) await this.follow(answer, told);
  }

  async drawTimeline(figure) {
    const layout = themed({ ...figure.layout, ...this.size(this.timeline), uirevision: "kept" }, this.root);
    this.figure = figure;
    layout.shapes = this.shapes();
    const all = { name: "all", title: "Show all", icon: this.Plotly.Icons.home, click: () => this.show(null) };
    const modeBarButtons = [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", all]];
    await this.Plotly.react(this.timeline, figure.data, layout, { ...CONFIG, modeBarButtons });
  }

  // Only while it is looked at: a map of thousands of blocks is more than all the rest.
  askBlocks() {
    if (this.panels.Blocks.hidden) return;
    this.blocksAsked += 1;
    this.busy();
    this.model.send({ ask: "blocks", number: this.blocksAsked });
  }

  async drawBlocks({ blocks, text }) {
    this.gaps.textContent = text;
    const layout = themed({ ...blocks.layout, ...this.size(this.blocks) }, this.root);
    const modeBarButtons = [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]];
    const first = !this.blocks.data;
    await this.Plotly.react(this.blocks, blocks.data, layout, { ...CONFIG, doubleClick: "reset", modeBarButtons });
    if (!first) return;
    this.blocks.on("plotly_click", ({ points }) => {
      const row = points.map((point) => point.customdata).find((number) => number >= 0);
      if (row !== undefined) this.model.send({ ask: "block", row });
    });
  }

  async drawLayers(figure) {
    // plotly draws its own buttons in colours that no dark theme can read, and no keyboard reaches them.
    const { updatemenus = [], ...layout } = figure.layout;
    const buttons = (updatemenus[0]?.buttons ?? []).map(({ label, args }, position) => {
      const button = element("button", "", label);
      button.setAttribute("aria-pressed", String(position === 0));
      button.addEventListener("click", () => {
        for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
        this.later(() => this.Plotly.restyle(this.layers, ...args));
      });
      return button;
    });
    this.bar.replaceChildren(...buttons);
    const margin = { ...layout.margin, l: 0, r: 0, t: 24 };
    const config = { ...CONFIG, modeBarButtons: [["toImage"]] };
    await this.Plotly.newPlot(this.layers, figure.data, themed({ ...layout, margin, ...this.size(this.layers) }, this.root), config);
  }

  // Undefined, which plotly fills in itself, while the page does not show the graph.
  size(graph) {
    const width = Math.round(graph.parentElement.getBoundingClientRect().width) || undefined;
    if (graph === this.timeline) return { width, height: this.model.get("height") };
    if (graph === this.blocks) {
      return { width, height: width && Math.max(this.panels.Blocks.clientHeight - this.gaps.offsetHeight - 6, 200) };
    }
    return { width, height: width && this.panels.Layers.clientHeight - this.bar.offsetHeight - 10 };
  }

  // What the figure has, and the cursor.
  shapes() {
    const shapes = this.figure.layout.shapes ?? [];
    // The peak, where the cursor is at first, has a mark of its own.
    const peak = this.figure.data.find((trace) => trace.name === "peak");
    if (this.row === (peak?.x[0] ?? -1)) return shapes;
    const line = { color: getComputedStyle(this.root).color, width: 1, dash: "dot" };
    return [...shapes, { type: "line", name: "cursor", x0: this.row, x1: this.row, y0: 0, y1: 1, yref: "paper", line }];
  }

  zoomed(change) {
    const [low, high] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if (low !== undefined) this.show([low, high]);
    else if (change["xaxis.range"]) this.show(change["xaxis.range"]);
  }

  show(window) {
    this.window = window;
    clearTimeout(this.settling);
    this.settling = setTimeout(() => this.askTimeline(), SETTLED);
    this.busy();
  }

  askTimeline() {
    clearTimeout(this.settling);
    this.settling = null;
    this.number += 1;
    this.busy();
    this.asked = this.size(this.timeline).width;
    this.model.send({ ask: "timeline", window: this.window, number: this.number, width: this.asked });
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step === undefined || this.row < 0) return;
    event.preventDefault();
    event.stopPropagation();
    this.model.send({ ask: "cursor", row: this.row + step });
  }

  // A table of rows of words: the first column is a size, the last the line of code, one the category with its colour.
  fill(table, titles, rows, cells) {
    const head = element("thead", "");
    const line = element("tr", "");
    line.append(...titles.map((title) => element("th", "", title)));
    head.append(line);
    const body = element("tbody", "");
    for (const row of rows) {
      const kind = element("td", "kind");
      const swatch = element("span", "swatch");
      swatch.style.background = row.colour;
      kind.append(swatch, row.category);
      const place = element("td", "");
      place.append(element("span", "place", row.place));
      if (row.code) place.append(element("code", "", row.code));
      const made = element("tr", "");
      made.append(...cells(row).map((cell) => (cell === "kind" ? kind : element("td", "", cell))), place);
      body.append(made);
    }
    table.replaceChildren(head, body);
  }

  showGrowth({ text, steps, rows }) {
    this.grew.textContent = text;
    this.buttons.Growth.hidden = !rows.length;
    this.fill(this.growth, ["Grew", "Category", "Layer", ...steps, "Line"], rows, (row) => [row.grew, "kind", row.layer, ...row.sizes]);
  }

  async showMoment({ row, text, tensors, lines }) {
    this.row = row;
    this.moment.textContent = text;
    this.fill(this.table, ["Size", "Category", "Layer", "Op", "Line"], tensors, (tensor) => [tensor.size, "kind", tensor.layer, tensor.op]);
    this.fill(this.lines, ["Size", "Category", "Blocks", "Line"], lines, (line) => [line.size, "kind", line.blocks]);
    this.askBlocks();
    if (this.Plotly) await this.unlessHeld(() => this.Plotly.relayout(this.timeline, { shapes: this.shapes() }));
  }

  showChip(layer) {
    this.chip.hidden = layer === null;
    this.chip.textContent = `${layer} ✕`;
    this.chip.title = `${layer} is lit in the timeline and in the blocks; click to show everything again`;
  }

  showSelection(layer) {
    this.showChip(layer);
    this.askTimeline();
    this.askBlocks();
  }

  async recolour() {
    if (!this.Plotly) return;
    const { font, modebar } = themed({ font: this.timeline.layout.font }, this.root);
    await this.Plotly.relayout(this.timeline, { font, modebar, shapes: this.shapes() });
    await this.Plotly.relayout(this.layers, { font, modebar });
    if (this.blocks.data) await this.Plotly.relayout(this.blocks, { font, modebar });
  }

  graphs() {
    return [this.timeline, this.layers, this.blocks].filter((graph) => graph.data);
  }

  async resize() {
    if (!this.Plotly) return;
    for (const graph of this.graphs()) {
      const { width, height } = this.size(graph);
      if (width && (width !== graph.layout?.width || height !== graph.layout?.height))
        await this.unlessHeld(() => this.Plotly.relayout(graph, { width, height }));
    }
    // Which labels have room depends on the width.
    const { width } = this.size(this.timeline);
    if (width && Math.abs(width - (this.asked ?? 0)) > 40) this.show(this.window);
  }

  close() {
    this.alive = false;
    clearTimeout(this.late);
    clearTimeout(this.settling);
    this.cleanups.forEach((cleanup) => cleanup());
    if (this.Plotly) for (const graph of this.graphs()) this.Plotly.purge(graph);
  }
}

// The static picture is for notebooks without a kernel; here it would be the same thing twice.
function hidePicture(picture) {
  const style = document.createElement("style");
  style.textContent = `.${picture}, .jp-OutputArea-child:has(.${picture}) { display: none !important }`;
  document.head.append(style);
  return () => style.remove();
}

export default {
  render({ model, el }) {
    const page = new Page(model, el);
    return () => page.close();
  },
};
