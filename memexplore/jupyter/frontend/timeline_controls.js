// Controls below the timeline: the unit of the horizontal axis, equal steps folded or not, and which picture is drawn.
import { element } from "./dom.js";

/** @typedef {import("./types").Axis} Axis */
/** @typedef {import("./types").Pictures} Pictures */
/** @typedef {{ onAxis: (axis: string, folds: boolean) => void, onPicture: (happened: boolean) => void }} Handlers */
/** @typedef {Handlers & { onPeak: () => void }} OwnHandlers */

const TITLES = /** @type {Record<string, string>} */ ({ event: "events", time: "time", layer: "layers" });

export class TimelineControls {
  /** @param {OwnHandlers} handlers */
  constructor({ onAxis, onPicture, onPeak }) {
    this.root = element("div", "timeline-controls");
    this.unit = labelled("Horizontal axis: ");
    this.unit.select.addEventListener("change", () => onAxis(this.unit.select.value, this.isFolded));
    this.fold = element("button", "fold-steps", "Equal steps folded");
    this.fold.type = "button";
    this.fold.addEventListener("click", () => onAxis(this.unit.select.value, !this.isFolded));
    this.picture = labelled("Picture: ");
    this.picture.select.addEventListener("change", () => onPicture(this.picture.select.selectedIndex === 1));
    this.peak = element("button", "to-peak", "To the peak");
    this.peak.type = "button";
    this.peak.title = "Move the cursor to the peak (P on the timeline)";
    this.peak.addEventListener("click", onPeak);
    this.root.append(this.picture.label, this.unit.label, this.fold, this.peak);
    this.drawPictures(null);
    this.drawPeak(true);
  }

  get isFolded() {
    return this.fold.getAttribute("aria-pressed") !== "false";
  }

  /** @param {Axis} axis */
  drawAxis({ chosen, choices, is_folded: isFolded, can_fold: canFold }) {
    const options = choices.map(({ value, disabled }) => {
      const option = element("option", "", disabled ? `${TITLES[value]} (${disabled})` : TITLES[value]);
      option.value = value;
      option.disabled = disabled !== "";
      return option;
    });
    if (this.unit.select.length !== options.length) this.unit.select.replaceChildren(...options);
    else options.forEach((option, index) => Object.assign(this.unit.select.options[index], { disabled: option.disabled, text: option.text }));
    this.unit.select.value = chosen;
    this.fold.hidden = !canFold;
    this.fold.setAttribute("aria-pressed", String(isFolded));
  }

  /** @param {boolean} isThere whether the cursor is at the peak; the place of the button stays */
  drawPeak(isThere) {
    this.peak.classList.toggle("memexplore-unseen", isThere);
  }

  /** @param {Pictures | null} pictures */
  drawPictures(pictures) {
    this.picture.label.hidden = pictures === null;
    if (!pictures) return;
    this.picture.select.replaceChildren(...pictures.labels.map((text) => element("option", "", text)));
    this.picture.select.selectedIndex = pictures.drawn;
  }
}

/** @param {string} text */
function labelled(text) {
  const label = element("label", "", text);
  const select = element("select");
  label.append(select);
  return { label, select };
}
