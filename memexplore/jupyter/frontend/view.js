// One view of the widget on the page: draws the kernel's messages and sends requests. Figures and tables come from the
// kernel ready to be drawn, and only what is on the screen is kept.
import { AddedTabs } from "./added_tabs.js";
import { Details } from "./details.js";
import { uniqueId } from "./dom.js";
import { Explorer } from "./explorer.js";
import { Kernel } from "./kernel.js";
import { LayerActions } from "./layer_actions.js";
import { loadPlotly, receivePlotly } from "./library.js";
import { LiveRun } from "./live.js";
import { LiveRegion } from "./live_region.js";
import { buildPage, hideStaticImage, keepKeys } from "./page.js";
import { PointerHold } from "./pointer_hold.js";
import { Requests } from "./requests.js";
import { SeenSettings } from "./seen_settings.js";
import { Tabs } from "./tabs.js";
import { TaskQueue } from "./task_queue.js";
import { markTheme, watchTheme } from "./theme.js";
import { Timeline } from "./timeline.js";
import { unpackAll } from "./unpacking.js";
import { VerdictBar } from "./verdict.js";
import { Zoom } from "./zoom.js";

/** @typedef {import("./types").Message} Message */
/** @typedef {import("./types").TapeContent} TapeContent */
/** @typedef {import("./types").DetailsContent} DetailsContent */
/** @typedef {import("./types").CursorContent} CursorContent */

const STATIC_AFTER_MS = 1500; // without an answer the static image is shown
const DRAWN_AFTER_MS = 100; // pages in the background draw no frames
const LABELS_PX = 40; // change of width after which the timeline chooses its labels again
const GONE = "The kernel that made this has ended or was restarted: this is its last picture. Run the cell again.";

export class View {
  /**
   * @param {import("./types").Model} model
   * @param {HTMLElement} root
   */
  constructor(model, root) {
    this.model = model;
    this.root = root;
    /** @type {import("./chart.js").Context} */
    this.context = { root, plotly: null, colours: null };
    this.isAlive = true;
    this.isStarted = false;
    this.detailsTape = 0; // number of the tape whose details are drawn
    /** @type {number | undefined} */
    this.labelledWidth = undefined; // width for which the kernel chose the labels
    this.axis = { axis: "event", equal: "folded" }; // of the timeline
    /** @type {[Message, any][]} */
    this.early = []; // messages before plotly.js has loaded
    this.kernel = new Kernel(model, root, {
      onGone: () => this.showGone(),
      onBack: () => this.showBack(),
      onIdle: () => this.updateBusy(),
      isRunning: () => this.explorer.isRunning,
    });
    this.requests = new Requests((request) => this.send(request), uniqueId(), {
      canRead: () => this.kernel.canRead,
      isWorking: () => this.explorer.isWaiting,
    });
    this.queue = new TaskQueue(() => this.updateBusy(), (error) => this.showProblem(error));
    this.zoom = new Zoom(() => this.requestTimeline(), () => this.updateBusy());
    this.verdict = new VerdictBar({ onLine: (line) => this.details.showLine(line) });
    this.live = new LiveRegion();
    this.tabs = new Tabs("At the cursor", (name) => this.onOpen(name));
    this.side = new Tabs("Settings and results", (name) => this.onOpen(name));
    this.layerActions = new LayerActions({
      onClear: () => this.request("select", { layer: null }, "selection"),
      onAction: (field, layer) => this.explorer.send({ type: "layer action", field, layer }),
    });
    this.explorer = new Explorer(this.requests, this.kernel, this.layerActions, {
      onBusy: () => this.updateBusy(),
      onRequest: (type) => this.afterRequest(type),
      onState: (state) => {
        this.verdict.drawApplied(state);
        this.verdict.showRefusal(state.problem);
        if (!this.run.state) this.timeline.legend.nameOutline(state.is_pinned ? "pinned" : "as written");
      },
    });
    this.seen = new SeenSettings(this.explorer.requests, {
      isZoomed: () => this.zoom.window !== null,
      selection: () => this.layerActions.layer,
      enqueue: (task) => this.queue.add(() => this.hold.run(task)),
      draw: (content) => this.drawPicture(content),
      answer: (content, early) => this.hold.run(() => this.drawTape(content, early)),
    });
    this.timeline = new Timeline(this.context, model.get("height"), {
      onZoom: (window) => this.zoom.show(window),
      onCursor: (row) => this.request("cursor", { row }),
      onAxis: (axis, folds) => this.chooseAxis(axis, folds),
      onPicture: (happened) => {
        this.seen.clear();
        this.request("picture", { picture: happened ? "as it happened" : "with room" }, "tape");
      },
    });
    this.details = new Details(this.context, this.tabs, {
      onSelect: (layer) => this.request("select", { layer }, "selection"),
      onHighest: () => this.request("highest layers"),
      onSelectBlock: (row) => this.request("block", { row }, "selection"),
    });
    this.run = new LiveRun(this.context, (request) => this.send({ ...request, view: this.requests.view }), {
      onLine: (line) => this.details.showLine(line),
      onKnobs: (state) => this.explorer.receive(state),
      onOutline: (name) => this.timeline.legend.nameOutline(name),
      enqueue: (task) => this.queue.add(task),
    });
    this.added = new AddedTabs(this.context, this.side, {
      onClick: (tab, row, label) => (this.run.state ? this.run : this.explorer).send({ type: "tab click", tab, row, label }),
      enqueue: (task) => this.queue.add(task),
    });
    this.hold = new PointerHold(this.timeline.graph, (task) => this.queue.add(task));
    buildPage(root, this);
    this.tabs.open("Layers");
    this.cleanups = this.listen();
    this.staticTimer = setTimeout(() => this.root.classList.add("memexplore-late"), STATIC_AFTER_MS);
    this.labelledWidth = this.timeline.size().width;
    this.requests.send("everything", { width: this.labelledWidth });
  }

  listen() {
    const resizes = new ResizeObserver(() => this.queue.add(() => this.resize()));
    resizes.observe(this.root);
    const listen = (/** @type {Message} */ message, /** @type {DataView[]} */ buffers) => {
      this.kernel.hear();
      this.requests.hear(message);
      this.queue.add(() => this.receive(message, buffers));
    };
    this.model.on("msg:custom", listen);
    return [
      keepKeys(this.root),
      () => resizes.disconnect(),
      () => this.model.off("msg:custom", listen),
      () => this.hold.close(),
      () => this.kernel.close(),
      () => this.requests.close(),
      () => this.verdict.close(),
      () => this.explorer.close(),
      () => this.run.close(),
      watchTheme(() => this.queue.add(() => this.recolour())),
    ];
  }

  /** @param {Record<string, unknown>} request */
  send(request) {
    if (this.kernel.isGone) return;
    this.model.send(request);
    this.kernel.expect();
  }

  /** Update `aria-busy`: screen readers and tests wait while the view changes by itself. */
  updateBusy() {
    const isDrawing = this.queue.pending > 0 || this.zoom.isSettling;
    const isWorking = !this.kernel.isGone && this.explorer.isWaiting;
    const isStale = this.detailsTape < this.requests.tape || this.seen.early !== null; // the details of a kernel that is gone stay so
    const isWaiting = !this.kernel.isGone && (this.requests.isWaiting || isStale);
    this.root.setAttribute("aria-busy", String(isDrawing || isWaiting || isWorking));
    this.root.classList.toggle("memexplore-working", isWorking);
    this.root.classList.toggle("memexplore-expected", isWorking && this.explorer.isExpected);
    this.root.classList.toggle("memexplore-stale", isStale);
  }

  /** The kernel is gone: its last picture stays, with zoom and hover; nothing that needs the kernel can be used. */
  showGone() {
    this.markGone(GONE);
    this.requests.settleAll();
    this.updateBusy();
  }

  /** The kernel was only late. */
  showBack() {
    this.markGone("");
    this.updateBusy();
  }

  /** @param {string} text empty while the kernel is there */
  markGone(text) {
    this.root.classList.toggle("memexplore-gone", text !== "");
    this.verdict.showGone(text);
    this.explorer.setGone(text !== "");
    this.details.setGone(text !== "");
    for (const part of [this.layerActions.root, this.timeline.controls.root]) part.inert = text !== "";
  }

  /** @param {unknown} error */
  showProblem(error) {
    this.verdict.showProblem(error);
    console.error(error);
  }

  // -- messages

  /**
   * @param {Message} message
   * @param {DataView[]} buffers
   */
  async receive(message, buffers) {
    if (!this.requests.concerns(message)) return;
    const { type } = message;
    if (type === "error") {
      this.requests.settleAll();
      this.showProblem(message.text);
    } else if (type === "plotly") {
      await receivePlotly(this.model.get("plotly"), buffers[0]);
    } else {
      /** @type {any} */
      const content = { ...(await unpackAll(buffers)), ...(message.tape === undefined ? {} : { tape: message.tape }) };
      if (type === "everything") this.start(content);
      else if (type === "live") this.run.receive(content.live);
      else if (!this.context.plotly) this.early.push([message, content]);
      else if (type !== "tape" || this.seen.arrive(content, buffers)) await this.draw(message, content);
    }
  }

  /**
   * @param {Message} message
   * @param {any} content
   */
  async draw(message, content) {
    const { type } = message;
    if (message.explorer) {
      this.explorer.receive(message.explorer);
      await this.seen.receive(content.tape);
    } else if (type === "tape") await this.hold.run(() => this.drawTape(content));
    else if (type === "details") await this.drawDetails(content);
    else if (type === "tabs") await this.added.put(content.tabs);
    else if (type === "open") this.open(content.tab);
    else if (type === "cursor") await this.drawCursor(content, true);
    else if (type === "selection") this.drawSelection(content.layer);
    if (type === "cursor" || type === "selection") {
      if (this.requests.isLatest(message)) this.requests.settle(type);
    } else if (type === "timeline" && this.requests.isLatest(message)) {
      await this.hold.run(() => this.requests.isLatest(message) && this.timeline.drawFigure(content.timeline));
      this.requests.settle(type);
    } else if (type === "blocks" && this.requests.isLatest(message)) {
      await this.details.blocks.drawBlocks(content);
      this.requests.settle(type);
    } else if (type === "highest layers" && this.requests.isLatest(message)) {
      this.details.layers.drawHighest(content.layers);
      this.requests.settle(type);
    }
  }

  /** @param {any} content */
  start(content) {
    if (this.isStarted) return;
    this.isStarted = true;
    this.early = [];
    if (content.live) this.run.receive(content.live);
    // plotly.js may come in a message after this one.
    loadPlotly(this.model, () => this.isAlive).then((plotly) => this.queue.add(() => this.drawFirst(plotly, content)));
  }

  /**
   * @param {import("./types").Plotly | null} plotly
   * @param {any} content
   */
  async drawFirst(plotly, content) {
    this.context.plotly = plotly;
    this.open(content.tab);
    if (content.explorer) this.explorer.receive(content.explorer);
    this.run.schedule();
    clearTimeout(this.staticTimer);
    this.root.classList.remove("memexplore-late");
    this.root.classList.add("memexplore-drawn");
    this.cleanups.push(hideStaticImage(this.model.get("picture")));
    await this.added.put(content.tabs);
    await this.drawTape(content);
    await this.drawDetails(content);
    for (const [message, early] of this.early) await this.draw(message, early);
  }

  // -- drawing

  /**
   * Draw summary and timeline; the details follow in a message of their own.
   * @param {TapeContent} content
   * @param {TapeContent} [early] the same picture, which was drawn before
   */
  async drawTape(content, early) {
    if (content.tape < this.requests.tape) return; // postponed by a drag, and replaced since
    const isNew = content.tape > this.requests.tape;
    this.requests.tape = content.tape;
    this.requests.settleAll(); // the kernel ignores requests about earlier tapes
    this.zoom.window = content.window;
    this.updateBusy();
    this.layerActions.drawLayer(content.selection);
    this.details.layers.select(content.selection);
    if (isNew) this.live.announce(`${content.verdict.headline} ${content.verdict.detail}`);
    const isDrawn = early !== undefined && this.timeline.figure === early.figure;
    if (!isDrawn) await this.drawPicture(content);
    else if (this.timeline.row !== content.row) await this.timeline.moveCursor(content.row);
    this.reportDrawn(content.tape);
  }

  /** @param {TapeContent} content */
  async drawPicture(content) {
    const { data, outline, layout, axis } = content;
    this.verdict.draw(content);
    this.timeline.row = content.row;
    this.timeline.caption = content.verdict.headline;
    content.figure ??= { data: [...data, ...outline], layout, axis };
    await this.timeline.drawFigure(content.figure);
    this.timeline.controls.drawPictures(content.pictures);
  }

  /**
   * After the next frame, report to the kernel that a tape is on the screen: the kernel then computes the details.
   * @param {number} tape
   */
  reportDrawn(tape) {
    const report = () => {
      if (tape !== this.requests.tape) return;
      this.request("drawn", {}, "details");
      if (this.detailsTape >= tape) this.requests.settle("details"); // they came with the tape
      this.updateBusy();
    };
    const timer = setTimeout(report, DRAWN_AFTER_MS);
    requestAnimationFrame(() => {
      clearTimeout(timer);
      setTimeout(report);
    });
  }

  /** @param {DetailsContent} content */
  async drawDetails(content) {
    if (content.tape < this.requests.tape) return;
    this.details.drawGrowth(content.growth);
    await this.hold.run(() => this.timeline.addHover(content.hover, this.zoom.window));
    await this.drawCursor(content);
    if (this.details.layers.isHighest) this.request("highest layers");
    this.detailsTape = content.tape;
    this.requests.settle("details");
    this.updateBusy();
  }

  /**
   * @param {CursorContent} content
   * @param {boolean} [isAnnounced]
   */
  async drawCursor(content, isAnnounced = false) {
    this.details.drawCursor(content);
    if (isAnnounced) this.live.announce(content.text);
    this.requestBlocks();
    await this.hold.run(() => this.timeline.moveCursor(content.row));
  }

  /** @param {string | null} layer */
  drawSelection(layer) {
    this.layerActions.drawLayer(layer);
    this.details.layers.select(layer);
    this.live.announce(layer === null ? "All layers are shown." : `${layer} is highlighted.`);
    this.zoom.settle();
    this.requestBlocks();
  }

  // -- requests

  /**
   * @param {string} axis
   * @param {boolean} folds
   */
  chooseAxis(axis, folds) {
    this.axis = { axis, equal: folds ? "folded" : "apart" };
    this.requestTimeline();
  }

  requestTimeline() {
    this.seen.clear();
    this.labelledWidth = this.timeline.size().width;
    this.request("timeline", { window: this.zoom.window, width: this.labelledWidth, ...this.axis });
  }

  /** Request the map of blocks if it is visible: thousands of blocks are more than everything else. */
  requestBlocks() {
    if (this.tabs.isOpen("Blocks")) this.request("blocks");
  }

  /**
   * @param {string} type
   * @param {Record<string, unknown>} [fields]
   * @param {string} [topic] what the reply is about
   */
  request(type, fields = {}, topic = type) {
    if (!this.kernel.isGone) this.requests.send(type, fields, topic); // else no reply would come
    this.updateBusy();
  }

  // -- changes of the page

  /** @param {string} type of a request of the explorer's controls */
  afterRequest(type) {
    if (type === "search") this.side.isChosen = false; // its results open their tab
    this.seen.request(type);
  }

  /**
   * Open a tab, unless the person has opened another one.
   * @param {string} name
   */
  open(name) {
    for (const tabs of [this.tabs, this.side]) if (tabs.has(name) && !tabs.isChosen) tabs.open(name);
  }

  /** @param {string} name */
  onOpen(name) {
    this.details.update();
    if (name === "Blocks") this.requestBlocks();
    this.queue.add(() => this.added.draw(name));
    this.queue.add(() => this.resize());
  }

  get charts() {
    const charts = [this.timeline, this.details.blocks, this.run.history, ...this.added.charts];
    return charts.filter((chart) => chart.isDrawn);
  }

  async recolour() {
    markTheme(this.root);
    this.context.colours = null;
    for (const chart of this.charts) await chart.recolour();
  }

  async resize() {
    if (!this.context.plotly) return;
    for (const chart of this.charts) await this.hold.run(() => chart.resize());
    const { width } = this.timeline.size();
    if (width && Math.abs(width - (this.labelledWidth ?? 0)) > LABELS_PX) this.zoom.show(this.zoom.window);
  }

  close() {
    this.isAlive = false;
    this.queue.close();
    this.zoom.cancel();
    clearTimeout(this.staticTimer);
    for (const cleanup of this.cleanups) cleanup();
    for (const chart of this.charts) this.context.plotly?.purge(chart.graph);
  }
}
