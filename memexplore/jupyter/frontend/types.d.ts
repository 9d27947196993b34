// Types of messages, figures and of what Jupyter and plotly.js provide. Read by the type checker only.

export type Numbers = ArrayLike<number>;

export interface Line {
  color: string;
  width: number;
  dash?: string;
}

/** A plotly trace, with the fields that the widget reads. */
export interface Trace {
  name: string;
  x: Numbers;
  y: Numbers;
  text?: string[];
  mode?: string;
  stackgroup?: string;
  fillcolor?: string;
  fillpattern?: { fgcolor: string };
  customdata?: Numbers;
  line?: Line;
  marker?: { size: number; color: string; symbol?: string; line: Line };
  showlegend?: boolean;
  legendrank?: number;
}

export interface Layout {
  width?: number;
  height?: number;
  font?: Record<string, unknown>;
  margin?: Record<string, number>;
  shapes?: Record<string, unknown>[];
  annotations?: Record<string, unknown>[];
  xaxis?: { range?: Range; [key: string]: unknown };
  [key: string]: unknown;
}

/** Places of rows on the horizontal axis of a timeline, linear between the knots, and the choices of axis. */
export interface Axis {
  rows: Numbers;
  xs: Numbers;
  chosen: string;
  choices: { value: string; disabled: string }[];
  is_folded: boolean;
  can_fold: boolean;
}

/** The two pictures of a run that did not fit, and the number of the one drawn. */
export interface Pictures {
  labels: string[];
  drawn: number;
}

export interface Figure {
  data: Trace[];
  layout: Layout;
  axis?: Axis;
}

/** First and last row of a zoomed timeline. */
export type Range = [number, number];
/** The rows shown, null for all. */
export type Window = Range | null;

interface PlotlyAxis {
  range: Range;
  _offset: number;
  _length: number;
}

export interface Click {
  points: { x: number; id: string; customdata: number | number[] }[];
  event?: MouseEvent;
}

/** An element that plotly has drawn into. */
export interface Graph extends HTMLDivElement {
  data?: Trace[];
  layout: Layout;
  _fullLayout: { xaxis: PlotlyAxis; yaxis: PlotlyAxis };
  /** The figure on the screen, for browser tests. */
  figure?: Figure;
  on(event: "plotly_relayout" | "plotly_relayouting", handler: (change: Record<string, any>) => void): void;
  on(event: "plotly_doubleclick" | "plotly_afterplot", handler: () => void): void;
  on(event: "plotly_click", handler: (click: Click) => void): void;
  on(event: "plotly_selected", handler: (selected?: { range?: { x: number[] } }) => void): void;
}

export interface Config {
  modeBarButtons?: unknown[][];
  [key: string]: unknown;
}

export interface Plotly {
  Icons: Record<string, unknown>;
  react(graph: Graph, data: Trace[], layout: Layout, config?: Config): Promise<unknown>;
  relayout(graph: Graph, change: Record<string, unknown>): Promise<unknown>;
  restyle(graph: Graph, change: Record<string, unknown>, traces?: number[]): Promise<unknown>;
  purge(graph: Graph): void;
  downloadImage(figure: Figure, options: { format: string; filename: string }): Promise<unknown>;
}

/** The widget's model, as anywidget passes it. */
export interface Model {
  get(name: "plotly" | "picture" | "comm_id"): string;
  get(name: "height"): number;
  send(request: Record<string, unknown>): void;
  on(event: "msg:custom", handler: (message: Message, buffers: DataView[]) => void): void;
  on(event: "comm_live_update" | "comm:close", handler: () => void): void;
  off(event: "msg:custom", handler: (message: Message, buffers: DataView[]) => void): void;
  off(event: "comm_live_update" | "comm:close", handler: () => void): void;
  /** Of JupyterLab; other pages have none, or one without a kernel. */
  widget_manager?: { kernel?: Connection | null; get_model?(id: string): Promise<{ comm?: Comm }> };
}

/** The model of a button that runs a cell, with what JupyterLab's manager of widgets knows of its views. */
export interface CellModel {
  get(name: "source" | "comm_id"): string;
  widget_manager?: {
    get_model?(id: string): Promise<{
      views?: Record<string, Promise<{ el: HTMLElement; luminoWidget: LabWidget }>>;
      widget_manager: { context?: { sessionContext: unknown } };
    }>;
  };
}

/** A widget of JupyterLab: a cell and a notebook are two. Only public members are used. */
export interface LabWidget {
  parent: LabWidget | null;
  model?: { type?: string; sharedModel: { insertCell(index: number, cell: Record<string, unknown>): void } };
  /** The cells of a notebook. */
  widgets?: LabWidget[];
  activeCellIndex?: number;
  node: HTMLElement;
}

/** JupyterLab's connection to a kernel. */
export interface Connection {
  status?: string;
  isDisposed?: boolean;
  statusChanged?: Signal;
  disposed?: Signal;
}

/** JupyterLab's connection to a kernel, as far as a page uses it that was opened while a cell runs. */
export interface ControlConnection {
  username: string;
  clientId: string;
  sendControlMessage(message: Record<string, unknown>): Future;
  iopubMessage: { connect(handler: (sender: unknown, message: IopubMessage) => void): void };
}

interface IopubMessage {
  header: { msg_type: string };
  content: { data?: unknown; metadata?: unknown; transient?: { display_id?: string } };
}

interface Future {
  msg: { header: { msg_id: string } };
}

/** A connection of a model, as ipywidgets wraps it. */
export interface Comm {
  send(data: unknown, callbacks?: unknown, metadata?: unknown, buffers?: unknown[]): string;
  /** Replace the handler of messages from the kernel. */
  on_msg?(handler: (message: unknown) => unknown): void;
  _hookupCallbacks(future: Future, callbacks?: unknown): void;
}

/** A cell of JupyterLab's model of a notebook; those with code have outputs. */
export interface OutputCell {
  id: string;
  trusted: boolean;
  outputs: {
    toJSON(): unknown[];
    clear(): void;
    add(output: unknown): void;
    set(index: number, output: unknown): void;
  };
}

/** JupyterLab's manager of the widgets of a notebook. */
export interface WidgetManager {
  kernel: ControlConnection | null;
  /** Whether all models of the kernel have been made. */
  restoredStatus: boolean;
  has_model(id: string): boolean;
  get_model(id: string): Promise<{ comm?: Comm }>;
  _create_comm(target: string, id: string): Promise<Comm>;
  new_model(options: Record<string, unknown>, state: unknown): Promise<unknown>;
  /** Of notebooks; consoles have none. */
  context?: { model: { dirty: boolean; cells: Iterable<OutputCell> } };
  /** Outputs without a model look for it again at this signal. */
  _restored: { emit(): void };
}

interface Signal {
  connect(handler: () => void): void;
  disconnect(handler: () => void): void;
}

/** A row of the tables of tensors, lines and growth. */
export interface MemoryRow {
  category: string;
  colour: string;
  location: string;
  code: string;
  /** `file:line`, empty if unknown. */
  path: string;
}
/** Equal tensors; `bytes` and `size` of all of them together, `each` such as "24 × 64.0 MiB", empty for a single one,
 * `tensor` such as "float32[8, 1024]", empty if unknown, `stream` empty where all blocks are on one. */
export type TensorRow = MemoryRow & {
  bytes: number;
  size: string;
  each: string;
  tensor: string;
  layer: string;
  op: string;
  stream: string;
};
export type LineRow = MemoryRow & { bytes: number; size: string; blocks: string };
export type GrowthRow = MemoryRow & { grew: string; layer: string; sizes: string[] };

/** Content of a tab that Python has added (`Tab` in view.py). */
export type AddedTab = { name: string } & (
  | ({ kind: "table" } & SettingsTable)
  /** `text` is what can be copied; `diff` is shown in its place, with "+", "-" or " " before each line, and "@" before a place. */
  | { kind: "code"; text: string; diff?: string }
  /** With `views`, buttons choose among several figures, of which `figure` is the first. */
  | { kind: "figure"; figure: Figure; views?: { label: string; figure: Figure }[] }
);

export interface SettingsTable {
  titles: string[];
  /** Of each column; left without it. */
  align?: ("left" | "right")[];
  rows: SettingsRow[];
  text?: string;
}

export interface SettingsRow {
  cells: Cell[];
  /** Whether this setting is the one shown. */
  current?: boolean;
  hint?: string;
  /** Short remark on the setting, as "trains differently". */
  mark?: string;
  /** Lines of code that a button of the row copies. */
  copy?: string;
}

/** `share` (0 to 1) is drawn as a bar, of the capacity; `tone` is a word beside the text, "tight" or "over". */
export type Cell = string | { text: string; share?: number; tone?: "tight" | "over" | "" };
/** Bytes of a layer, or of several layers of the same structure (`LayerRow` in analysis/layer_rows.py). */
export interface LayerRow {
  name: string;
  label: string;
  kind: string;
  count: number;
  size: string;
  /** Bytes of each layer of the row, as "each 2.00 GiB"; empty for a single one. */
  each: string;
  /** Bytes by category, in the order of `LayerTree.categories`. */
  sizes: number[];
  children: LayerRow[];
  members: LayerRow[];
}

export interface LayerTree {
  total: number;
  categories: { name: string; colour: string }[];
  rows: LayerRow[];
}

export interface CursorContent {
  row: number;
  text: string;
  layers: LayerTree;
  tensors: TensorRow[];
  lines: LineRow[];
}

/** A line of code: `Cell In[3], line 4`, its source, and `file:line`. */
export interface Place {
  text: string;
  code: string;
  path: string;
}

/** Whether a run fits, in one sentence. Sizes in bytes. */
export interface Verdict {
  level: "fits" | "tight" | "oom" | "error" | "growing" | "none";
  headline: string;
  detail: string;
  /** Places in the code that the verdict is about: the user's own first. */
  where: Place[];
  /** The user's line whose memory grows from step to step, null without growth. */
  grows: Place | null;
  used: number;
  /** Null if unknown. */
  capacity: number | null;
  /** More than `used` where the run stopped for lack of memory. */
  needed: number;
  device: string;
}

export interface TapeContent {
  tape: number;
  verdict: Verdict;
  notes: string[];
  data: Trace[];
  outline: Trace[];
  layout: Layout;
  axis: Axis;
  pictures: Pictures | null;
  row: number;
  selection: string | null;
  window: Window;
  /** Data, outline, layout and axis as drawn, made by the page. */
  figure?: Figure;
}

export interface Hover {
  window: Window;
  text: string[];
  [key: string]: unknown;
}

export interface DetailsContent extends CursorContent {
  tape: number;
  growth: { text: string; steps: string[]; rows: GrowthRow[] };
  hover: Hover;
}

export interface BlocksContent {
  blocks: Figure;
  text: string;
}

/** Columns of steps: `first` and `last` step, and for each curve its median, and with `_low` and `_high` its extremes. */
export type StepColumns = Record<string, Numbers>;

/** A step that the history marks. */
export interface StepMark {
  step: number;
  kind: string;
  text: string;
}

/** State of a watched run: as `live` of a message "live", and as `live` of "everything". Sizes in bytes. */
export interface LiveState {
  state: "watching" | "paused" | "ended" | "failed";
  title: string;
  headline: string;
  cost: string;
  peak: string;
  memory: string;
  worst: string;
  level: Verdict["level"];
  device: string;
  used: number;
  highest: number;
  capacity: number | null;
  leak: { text: string; line: string; held_by: string[] } | null;
  error: string;
  notes: string[];
  /** Steps with a tape, the one in the timeline, the one drawn as its outline, and the pinned one. */
  recorded: number[];
  shown: number | null;
  before: number | null;
  pinned: number | null;
  /** Whether the timeline follows the newest recorded step. */
  follows: boolean;
  /** Whether the run is shown as a single line. */
  form: "page" | "line";
  steps_text: string;
  wants_pause: boolean;
  /** The figure of the history without steps; with all steps only. */
  template?: Figure;
  /** All steps in bins. */
  base?: StepColumns;
  /** The steps after `first_step`, one entry each. */
  new?: StepColumns;
  first_step?: number;
  marks: StepMark[];
  /** The knobs, when they have changed. */
  explorer?: ExplorerState;
}

/** A message of the kernel before its buffers are unpacked. `number` and `view`, or in a message to all views `sender`,
 * identify the request it replies to. */
export interface Message {
  type: string;
  tape?: number;
  view?: string;
  sender?: string;
  number?: number;
  text?: string;
  explorer?: ExplorerState;
}

/** One control of the explorer. The kernel decides all texts; the page draws them and sends requests. */
export interface KnobRow {
  /** Identifies the knob in requests. */
  field: string;
  label: string;
  kind: "slider" | "choice" | "switch" | "text";
  /** Labels of the positions, in order; a switch has two (off, on), a text none. */
  options: string[];
  /** First index and title of each group of `options`; empty without groups. */
  groups: { first: number; title: string }[];
  /** Of each option why it cannot be chosen now, empty if it can; no entries where all can. */
  impossible: string[];
  /** Position of the setting wanted, -1 for a text. */
  index: number;
  /** The setting wanted, of a text knob. */
  value: string;
  /** What the code says: "AdamW", "fp32", "64"; empty if unknown. */
  written: string;
  /** Unit of the positions, as "samples"; for screen readers: "64 samples". */
  unit: string;
  /** Unit behind a 1: "1 sample". */
  unit_of_one: string;
  changed: boolean;
  /** Why the knob cannot be set, empty if it can. */
  disabled: string;
  /** Why the last request for this knob was not applied, empty if it was. */
  problem: string;
  group: string;
  /** Whether the knob is in the rows that are always seen. */
  primary: boolean;
}

/** Buttons for the selected layer. */
export interface LayerAction {
  field: string;
  label: string;
  is_on: boolean;
  disabled: string;
}

/** State of an explorer: as `explorer` of a message "explorer", sent whole at each change, and as `explorer` of
 * "everything", null in a view without an explorer. */
export interface ExplorerState {
  knobs: KnobRow[];
  /** Knobs that do not apply here, with one line of reason for each group of labels. */
  hidden: { label: string; reason: string }[];
  changes: { field: string; label: string; text: string }[];
  /** Change of the peak in per cent, as "−47 %", against the step as written and the pinned setting; else empty. */
  against: { written: string; pinned: string };
  is_pinned: boolean;
  can_undo: boolean;
  can_redo: boolean;
  search: {
    state: "idle" | "running" | "done" | "stopped" | "unavailable";
    done: number;
    /** Runs that the search plans, an estimate while it runs. */
    planned: number;
    /** Estimate, null before there is one. */
    seconds_left: number | null;
    /** One line: progress, result, or why a search is not possible. */
    text: string;
  };
  layer: { name: string | null; actions: LayerAction[] };
  /** Number of the latest request received from each page, by the id of its view. A page sends later ones again. */
  received: { [view: string]: number };
  /** Rising numbers of the setting wanted and of the setting drawn: the picture is of another setting where they
   * differ. */
  wanted: number;
  shown: number;
  /** Whether a setting is being run. */
  working: boolean;
  /** Whether picture and verdict are those that the setting will probably have, until its run has ended. */
  expected: boolean;
  /** Why a setting was not applied, where no single knob is the cause; else empty. */
  problem: string;
  /** Notes on the applied knobs, and where they were not applied. */
  notes: string[];
  skipped: { site: string; reason: string }[];
}

/** Requests of the explorer's controls, without `tape`. `number` rises in each page, `view` is the id of the page's view,
 * `after` the number of the request that the kernel must have received before this one, 0 if none is under way. All requests with the same `drag`, the id of one drag or held key, are one entry of the history. */
export type ExplorerRequest = { number: number; after: number; view: string } & (
  /* `label` is that of the option, as the options may have changed meanwhile. */
  | { type: "knob"; field: string; index: number; label?: string; drag: string }
  | { type: "knob"; field: string; value: string; drag: string }
  | { type: "reset"; field: string }
  | { type: "reset all" | "undo" | "redo" | "pin" | "unpin" | "search" | "stop" }
  | { type: "layer action"; field: string; layer: string }
  | { type: "tab click"; tab: string; row: number; label?: string }
);
