// Steps of a watched run: bins of all steps and new steps arrive, columns for the figure come out, in bounded memory.

/** @typedef {import("./types").StepColumns} StepColumns */
/** @typedef {import("./types").LiveState} LiveState */
/** @typedef {import("./types").StepMark} StepMark */

const MOST_COLUMNS = 400; // of the figure: one for every two pixels

export class LiveSteps {
  constructor() {
    /** @type {Record<string, number[]>} */
    this.columns = {};
    /** @type {Map<number, StepMark>} */
    this.marks = new Map();
    this.last = 0; // number of the newest step
    this.isComplete = true; // whether no step between the first and the last is missing
  }

  /**
   * Take the steps of a message: all of them in bins, or those after an earlier message.
   * @param {Pick<LiveState, "base" | "new" | "marks" | "first_step">} message
   */
  take({ base, new: added, marks, first_step: firstStep = 0 }) {
    if (base) {
      this.columns = Object.fromEntries(Object.entries(base).map(([name, values]) => [name, Array.from(values)]));
      this.marks.clear();
      this.isComplete = true;
    } else if (added) {
      if (firstStep > this.last) this.isComplete = false; // a message was lost, or came before this page listened
      const start = Array.from(added.first).findIndex((step) => step > this.last);
      for (const [name, values] of Object.entries(added)) {
        if (start >= 0) (this.columns[name] ??= []).push(...Array.from(values).slice(start));
      }
    }
    for (const mark of marks) this.marks.set(mark.step, mark);
    this.last = this.columns.last?.at(-1) ?? 0;
  }

  /** The columns that the figure draws. */
  drawn() {
    return thinned(this.columns, MOST_COLUMNS);
  }
}

/**
 * Return columns of at most `most` entries: of neighbours the lowest minimum, the mean of the medians, the highest maximum.
 * @param {Record<string, number[]>} columns
 * @param {number} most
 * @returns {Record<string, number[]>}
 */
export function thinned(columns, most) {
  const count = columns.first?.length ?? 0;
  const width = Math.ceil(count / most);
  if (width <= 1) return columns;
  return Object.fromEntries(
    Object.entries(columns).map(([name, values]) => {
      const merge = name === "first" || name.endsWith("_low") ? lowest : name === "last" || name.endsWith("_high") ? highest : mean;
      /** @type {number[]} */
      const merged = [];
      for (let start = 0; start < count; start += width) merged.push(merge(values.slice(start, start + width).filter((value) => !Number.isNaN(value))));
      return [name, merged];
    }),
  );
}

/** @param {number[]} values */
function lowest(values) {
  return values.length ? Math.min(...values) : NaN;
}

/** @param {number[]} values */
function highest(values) {
  return values.length ? Math.max(...values) : NaN;
}

/** @param {number[]} values */
function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : NaN;
}

const SERIES = { peak: "peak", reserved: "peak_reserved", "after the step": "after" }; // as figures/history.py names them
const BAND = " range";

/**
 * Return the traces of a figure of the history, filled with columns and marks.
 * @param {import("./types").Trace[]} template
 * @param {Record<string, number[]>} columns
 * @param {Iterable<StepMark>} marks
 * @param {Record<string, string>} titles title of a trace -> kind of its marks
 */
export function filled(template, columns, marks, titles) {
  const { first = [], last = [] } = columns;
  const steps = first.map((step, index) => (step + last[index]) / 2);
  const all = [...marks];
  return template.map((trace) => {
    const column = SERIES[/** @type {keyof typeof SERIES} */ (trace.name.replace(BAND, ""))];
    if (column && trace.name.endsWith(BAND)) {
      const [low, high] = [columns[`${column}_low`] ?? [], columns[`${column}_high`] ?? []];
      return { ...trace, x: [...steps, ...[...steps].reverse()], y: [...high, ...[...low].reverse()] };
    }
    if (column) return { ...trace, x: steps, y: columns[column] ?? [] };
    const own = all.filter(({ kind }) => kind === titles[trace.name]);
    const heights = own.map(({ step }) => heightAt(columns, step));
    const text = own.map((mark) => `step ${mark.step.toLocaleString("en")}: ${escaped(mark.text)}`);
    return { ...trace, x: own.map(({ step }) => step), y: heights, text, showlegend: own.length > 0 };
  });
}

/**
 * Return the maximum of the peak of the bin with a step.
 * @param {Record<string, number[]>} columns
 * @param {number} step
 */
function heightAt({ last = [], peak_high: high = [] }, step) {
  const index = last.findIndex((each) => each >= step);
  return index < 0 || Number.isNaN(high[index]) ? 0 : high[index];
}

/** @param {string} text */
function escaped(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

/**
 * Return the highest value of the drawn curves.
 * @param {Record<string, number[]>} columns
 */
export function highestOfColumns(columns) {
  const values = Object.values(SERIES).flatMap((name) => (columns[`${name}_high`] ?? []).filter((value) => !Number.isNaN(value)));
  return values.reduce((most, value) => Math.max(most, value), 1);
}
