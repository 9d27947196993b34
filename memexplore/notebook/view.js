// Draws a Tape. Figures and tables come from the kernel, ready to be drawn, whenever they are needed: nothing is computed
// here, and nothing is kept but what is on the screen.

const PATIENCE = 1500; // ms without an answer until the static picture is shown instead
const RESTED = 150; // ms without another tape until the chart of the layers is drawn
const SETTLED = 150; // ms without a further zoom until the kernel is asked for the window
// Buttons are listed one by one: among plotly's own is one that uploads the chart.
// Two clicks within 600 ms are a double click: plotly's own 300 ms are too short on a busy machine.
const CONFIG = { displaylogo: false, responsive: false, doubleClick: false, doubleClickDelay: 600 };

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
    this.tape = 0; // number of the tape on the screen
    this.told = 0; // number of the tape whose layers and tables are on the screen
    this.working = false; // whether the kernel is making another tape
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
    this.root.setAttribute("aria-busy", String(waits || this.working || this.told < this.tape));
    this.root.classList.toggle("memexplore-working", this.working);
  }

  ask(question) {
    this.model.send({ ...question, tape: this.tape });
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
    this.stage = element("div", "stage");
    this.timeline = element("div", "timeline");
    this.areas = new Areas(this.timeline);
    this.stage.append(this.areas.canvas, this.timeline, this.areas.legend);
    this.timeline.style.height = `${this.model.get("height")}px`;
    this.timeline.tabIndex = 0;
    this.timeline.setAttribute("aria-label", "Timeline of allocated memory; left and right arrow move the cursor");
    this.timeline.addEventListener("keydown", (event) => this.key(event));
    this.tabs = element("div", "tabs");
    this.tabs.setAttribute("role", "tablist");
    this.panels = {};
    for (const name of ["Layers", "Tensors", "Lines", "Blocks", "Growth"]) this.panels[name] = element("div", "panel");
    this.buttons = {};
    this.sheets = {}; // what is on the tabs that somebody added, by name
    for (const name of Object.keys(this.panels)) this.addTab(name);
    this.chip = element("button", "chip");
    this.chip.hidden = true;
    this.chip.addEventListener("click", () => this.ask({ ask: "select", box: null }));
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
    this.root.append(this.stage, this.tabs, this.moment);
    this.root.append(...Object.values(this.panels));
    this.open("Layers");
  }

  addTab(name) {
    const tab = element("button", "", name);
    tab.setAttribute("role", "tab");
    tab.addEventListener("click", () => this.open(name));
    this.buttons[name] = tab;
    this.tabs.insertBefore(tab, this.chip ?? null);
    this.panels[name].setAttribute("role", "tabpanel");
    this.panels[name].setAttribute("aria-label", name);
  }

  open(name) {
    for (const tab of this.tabs.querySelectorAll("[role=tab]"))
      tab.setAttribute("aria-selected", String(tab.textContent === name));
    for (const [key, panel] of Object.entries(this.panels)) panel.hidden = key !== name;
    this.moment.hidden = !["Tensors", "Lines", "Blocks"].includes(name);
    if (name === "Blocks") this.askBlocks();
    if (name in this.sheets) this.later(() => this.drawSheet(name));
    this.later(() => this.resize());
  }

  async take(message, buffers) {
    const { answer } = message;
    if (answer === "error") return this.complain(message.text);
    if (answer === "plotly") return takePlotly(this.model.get("plotly"), buffers[0]);
    if (answer === "working" || answer === "rest") {
      this.working = answer === "working";
      return this.busy();
    }
    const content = {};
    for (let at = 0; at < buffers.length; at += 2) Object.assign(content, await unpack(buffers[at], buffers[at + 1]));
    if (message.tape !== undefined) content.tape = message.tape;
    if (answer === "everything") return this.drawEverything(content);
    if (!this.Plotly) this.early.push([answer, content]);
    else return this.follow(answer, content);
  }

  async follow(answer, content) {
    if (answer === "tape") return this.unlessHeld(() => this.drawTape(content));
    if (answer === "details") return this.drawDetails(content);
    if (answer === "sheets") return this.takeSheets(content.sheets);
    if (answer === "open") return this.open(content.tab);
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
    this.open(content.tab);
    for (const part of [this.root, ...this.root.parentElement.querySelectorAll(".memexplore-knobs")])
      part.addEventListener("keydown", keepKey);
    // ipywidgets ties a slider's label to nothing.
    for (const handle of this.root.parentElement.querySelectorAll(".memexplore-knobs .noUi-handle"))
      handle.setAttribute("aria-label", handle.closest(".widget-slider").querySelector("label").textContent);
    clearTimeout(this.late);
    this.root.classList.remove("memexplore-late");
    this.root.classList.add("memexplore-drawn");
    this.cleanups.push(hidePicture(this.model.get("picture")));
    await this.takeSheets(content.sheets);
    await this.drawTape(content);
    await this.drawDetails(content);
    this.timeline.on("plotly_relayout", (change) => this.zoomed(change));
    for (const change of ["plotly_relayout", "plotly_relayouting"]) this.timeline.on(change, () => this.areas.draw());
    this.timeline.on("plotly_doubleclick", () => this.show(null));
    this.timeline.on("plotly_click", ({ points }) => this.ask({ ask: "cursor", row: points[0].x }));
    this.layers.on("plotly_icicleclick", ({ points }) => this.ask({ ask: "select", box: points[0].id }));
    for (const [answer, told] of this.early) await this.follow(answer, told);
  }

  // Sentences and timeline of a tape; the rest is told when it is known (`drawDetails`).
  async drawTape(content) {
    if (content.tape < this.tape) return; // the next one was drawn while this one waited
    this.tape = content.tape;
    this.working = false;
    this.window = content.window;
    this.row = content.row;
    this.problem.textContent = "";
    [this.sentence.textContent, this.fits.textContent] = content.sentence;
    this.oom.textContent = content.oom;
    this.notes.hidden = !content.notes.length;
    const summary = element("summary", "", content.notes.length === 1 ? "1 assumption" : `${content.notes.length} assumptions`);
    const list = element("ul", "");
    list.append(...content.notes.map((note) => element("li", "", note)));
    this.notes.replaceChildren(summary, list);
    this.showChip(content.selection);
    // Questions about the tape before get no answer.
    [this.answered, this.mapped] = [this.number, this.blocksAsked];
    await this.drawTimeline({ data: [...content.data, ...content.outline], layout: content.layout });
    // The kernel begins with the rest when this is on the screen, and a page in the background draws no frames.
    const told = () => content.tape === this.tape && this.ask({ ask: "drawn" });
    const late = setTimeout(told, 100);
    requestAnimationFrame(() => {
      clearTimeout(late);
      setTimeout(told);
    });
  }

  async drawDetails(content) {
    if (content.tape < this.tape) return;
    this.showGrowth(content.growth);
    await this.drawHover(content.hover);
    await this.showMoment(content);
    if (!this.layers.data) return this.drawLayersOf(content);
    // It takes longer than all the rest: a slider that is being dragged does not wait for it.
    clearTimeout(this.resting);
    this.resting = setTimeout(() => this.later(() => this.drawLayersOf(content)), RESTED);
  }

  async drawLayersOf(content) {
    if (content.tape < this.tape) return;
    await this.drawLayers(content.layers);
    this.told = content.tape;
  }

  // What the mouse is told comes later than what it is told about.
  async drawHover({ window, text, ...rest }) {
    const same = JSON.stringify(window) === JSON.stringify(this.window);
    if (!same || this.timeline.data[0].x.length !== text.length) return; // a zoom has brought its own
    await this.unlessHeld(() => this.Plotly.restyle(this.timeline, { text: [text], ...rest }, [0]));
  }

  async drawTimeline(figure) {
    const layout = themed({ ...figure.layout, ...this.size(this.timeline), uirevision: "kept" }, this.root);
    this.figure = figure;
    layout.shapes = this.shapes();
    layout.showlegend = false;
    const { Icons } = this.Plotly;
    const all = { name: "all", title: "Show all", icon: Icons.home, click: () => this.show(null) };
    const save = { name: "save", title: "Download plot as a PNG", icon: Icons.camera, click: () => this.download() };
    const modeBarButtons = [[save], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", all]];
    // plotly has the axes, the words and the mouse; one trace that is not seen tells it where the events are.
    const events = { ...figure.data.find(({ name }) => name === "allocated"), mode: "none" };
    await this.Plotly.react(this.timeline, [events], layout, { ...CONFIG, modeBarButtons });
    this.areas.take(figure.data);
    this.areas.draw();
    this.timeline.figure = figure; // what is on the screen, for whoever looks at the element
  }

  // The picture as plotly draws the whole of it.
  download() {
    const data = this.figure.data.filter(({ name }) => !this.areas.hidden.has(name));
    const layout = themed({ ...this.figure.layout, ...this.size(this.timeline) }, this.root);
    layout.xaxis = { ...layout.xaxis, range: this.timeline.layout.xaxis.range };
    layout.paper_bgcolor = getComputedStyle(this.root).getPropertyValue("--memexplore-paper").trim();
    return this.Plotly.downloadImage({ data, layout }, { format: "png", filename: "memexplore" });
  }

  // Only while it is looked at: a map of thousands of blocks is more than all the rest.
  askBlocks() {
    if (this.panels.Blocks.hidden) return;
    this.blocksAsked += 1;
    this.busy();
    this.ask({ ask: "blocks", number: this.blocksAsked });
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
      if (row !== undefined) this.ask({ ask: "block", row });
    });
  }

  async drawLayers(figure) {
    // plotly draws its own buttons in colours that no dark theme can read, and no keyboard reaches them.
    const { updatemenus = [], ...layout } = figure.layout;
    const choices = updatemenus[0]?.buttons ?? [];
    const chosen = choices.find(({ label }) => label === this.choice) ?? choices[0];
    const buttons = choices.map(({ label, args }) => {
      const button = element("button", "", label);
      button.setAttribute("aria-pressed", String(label === chosen.label));
      button.addEventListener("click", () => {
        this.choice = label;
        for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
        this.later(() => this.Plotly.restyle(this.layers, ...args));
      });
      return button;
    });
    this.bar.replaceChildren(...buttons);
    const margin = { ...layout.margin, l: 0, r: 0, t: 24 };
    const config = { ...CONFIG, modeBarButtons: [["toImage"]] };
    // The layer that the chart is folded to stays so where the new tape has it.
    const [trace] = figure.data;
    const level = this.layers.data?.[0]?.level;
    if (level !== undefined && trace.ids.includes(level)) trace.level = level;
    await this.Plotly.react(this.layers, [trace], themed({ ...layout, margin, ...this.size(this.layers) }, this.root), config);
    if (chosen && chosen !== choices[0]) await this.Plotly.restyle(this.layers, ...chosen.args);
  }

  // Undefined, which plotly fills in itself, while the page does not show the graph.
  size(graph) {
    const width = Math.round(graph.parentElement.getBoundingClientRect().width) || undefined;
    if (graph === this.timeline) return { width, height: this.model.get("height") };
    if (graph === this.blocks) {
      return { width, height: width && Math.max(this.panels.Blocks.clientHeight - this.gaps.offsetHeight - 6, 200) };
    }
    if (graph !== this.layers) return { width, height: width && Math.max(graph.parentElement.clientHeight - 8, 200) };
    return { width, height: width && this.panels.Layers.clientHeight - this.bar.offsetHeight - 10 };
  }

  // -- tabs beside those of the tape

  async takeSheets(sheets) {
    for (const sheet of sheets) {
      const { name } = sheet;
      if (!this.panels[name]) {
        this.panels[name] = element("div", "panel");
        this.panels[name].hidden = true;
        this.root.append(this.panels[name]);
        this.addTab(name);
      }
      this.sheets[name] = { ...this.sheets[name], ...sheet, stale: true };
      if (!this.panels[name].hidden) await this.drawSheet(name);
    }
  }

  async drawSheet(name) {
    const sheet = this.sheets[name];
    if (!sheet.stale) return;
    sheet.stale = false;
    if (sheet.kind === "table") this.drawTable(name, sheet);
    else if (sheet.kind === "code") this.drawCode(name, sheet);
    else await this.drawFigure(name, sheet);
  }

  drawTable(name, { titles, rows, text }) {
    const head = element("thead", "");
    const line = element("tr", "");
    line.append(...titles.map((title) => element("th", "", title)));
    head.append(line);
    const body = element("tbody", "");
    for (const [number, { cells, current, hint }] of rows.entries()) {
      const made = element("tr", "row");
      if (current) made.setAttribute("aria-current", "true");
      if (hint) made.title = hint;
      made.append(...cells.map((cell, column) => {
        const place = element("td", "");
        if (column) place.textContent = cell;
        else {
          // A button, for the keyboard.
          const button = element("button", "pick", cell);
          button.addEventListener("click", () => this.model.send({ ask: "pick", sheet: name, number }));
          place.append(button);
        }
        return place;
      }));
      body.append(made);
    }
    const table = element("table", "sheet");
    table.append(head, body);
    // Who is on the third button with the keyboard stays there.
    const buttons = () => [...this.panels[name].querySelectorAll("button")];
    const focused = buttons().indexOf(document.activeElement);
    this.panels[name].replaceChildren(...(text ? [element("p", "grew", text)] : []), ...(rows.length ? [table] : []));
    buttons()[focused]?.focus();
  }

  drawCode(name, { text }) {
    const code = element("pre", "code", text);
    code.tabIndex = 0;
    const copy = element("button", "copy", "Copy");
    copy.addEventListener("click", async () => {
      // Without https, or in a frame, there may be no clipboard: then the text is at least selected.
      getSelection().selectAllChildren(code);
      await navigator.clipboard?.writeText(text).then(() => (copy.textContent = "Copied"), () => {});
      setTimeout(() => (copy.textContent = "Copy"), 1500);
    });
    this.panels[name].replaceChildren(copy, code);
  }

  async drawFigure(name, sheet) {
    const first = !sheet.graph;
    if (first) {
      sheet.graph = element("div", "figure");
      this.panels[name].replaceChildren(sheet.graph);
    }
    const { data, layout } = sheet.figure;
    const config = { ...CONFIG, doubleClick: "reset", modeBarButtons: [["toImage"], ["zoom2d", "pan2d", "resetScale2d"]] };
    await this.Plotly.react(sheet.graph, data, themed({ ...layout, ...this.size(sheet.graph) }, this.root), config);
    if (!first) return;
    sheet.graph.on("plotly_click", ({ points }) => {
      const number = [points[0].customdata].flat()[0];
      if (Number.isInteger(number)) this.model.send({ ask: "pick", sheet: name, number });
    });
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
    this.ask({ ask: "timeline", window: this.window, number: this.number, width: this.asked });
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step === undefined || this.row < 0) return;
    event.preventDefault();
    event.stopPropagation();
    this.ask({ ask: "cursor", row: this.row + step });
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
    for (const graph of this.graphs()) if (graph !== this.timeline) await this.Plotly.relayout(graph, { font, modebar });
  }

  graphs() {
    const added = Object.values(this.sheets).map(({ graph }) => graph);
    return [this.timeline, this.layers, this.blocks, ...added].filter((graph) => graph?.data);
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
    for (const timer of [this.late, this.settling, this.resting]) clearTimeout(timer);
    this.cleanups.forEach((cleanup) => cleanup());
    if (this.Plotly) for (const graph of this.graphs()) this.Plotly.purge(graph);
  }
}

// JupyterLab would take arrows, Enter and letters for commands to the notebook, and away from what is focused.
function keepKey(event) {
  const { ctrlKey, metaKey, altKey, shiftKey, key } = event;
  if (!ctrlKey && !metaKey && !altKey && key !== "Escape" && !(shiftKey && key === "Enter")) event.stopPropagation();
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
