import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

const file = new URL("../../../memexplore/jupyter/frontend/colours.css", import.meta.url);
const [light, dark] = readFileSync(file, "utf8").split('[data-memexplore-theme="dark"]').map(variables);
// What JupyterLab's own two themes put in place of the fallbacks.
const LAB = {
  light: { ...light, paper: "#ffffff", raised: "#eeeeee" },
  dark: { ...light, ...dark, paper: "#111111", raised: "#212121" },
};

/** The colours of a block of CSS: of nested variables the innermost fallback. */
function variables(css) {
  return Object.fromEntries([...css.matchAll(/--memexplore-([a-z]+):[^;]*(#[0-9a-f]{6})/g)].map(([, name, hex]) => [name, hex]));
}

/** Luminance of WCAG 2.2. */
function luminance(hex) {
  const channels = [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16) / 255);
  const [red, green, blue] = channels.map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

const css = (name) => readFileSync(new URL(`../../../memexplore/jupyter/frontend/${name}.css`, import.meta.url), "utf8");

/** The declarations of the rules whose selector contains a text. */
function rules(text, selector) {
  return [...text.matchAll(/([^{}]*)\{([^{}]*)\}/g)].filter(([, names]) => names.includes(selector)).map(([, , body]) => body);
}

test("a hidden entry of the legend stays legible: struck out, not pale", () => {
  const entry = rules(css("details"), '.memexplore-entry[aria-pressed="false"]').join();
  assert.ok(!entry.includes("opacity"), entry);
  assert.match(entry, /color: var\(--memexplore-faint\)/);
});

test("swatches and the bars of layers have an outline that stands out", () => {
  for (const body of [...rules(css("layers"), ".memexplore-layer-bar span"), rules(css("details"), ".memexplore-swatch").at(-1)]) {
    assert.match(body, /(outline|border): 1px solid var\(--memexplore-outline\)/);
  }
});

test("black on white has the largest contrast", () => {
  assert.equal(contrast("#000000", "#ffffff"), 21);
});

const TEXTS = ["ink", "faint", "accent", "good", "warning", "error"];
const MARKS = ["outline", "within", "beyond"];
const themes = { light, dark: { ...light, ...dark }, "JupyterLab light": LAB.light, "JupyterLab dark": LAB.dark };

for (const [name, colours] of Object.entries(themes)) {
  for (const text of TEXTS) {
    for (const ground of ["paper", "raised"]) {
      test(`${name}: ${text} is legible on ${ground}`, () => {
        assert.ok(contrast(colours[text], colours[ground]) >= 4.5, `${contrast(colours[text], colours[ground])}`);
      });
    }
  }
  for (const mark of MARKS) {
    test(`${name}: ${mark} stands out from paper and raised`, () => {
      for (const ground of ["paper", "raised"]) {
        assert.ok(contrast(colours[mark], colours[ground]) >= 3, `${ground} ${contrast(colours[mark], colours[ground])}`);
      }
    });
  }
  test(`${name}: text on pressed buttons, and code in a diff, is legible`, () => {
    assert.ok(contrast(colours.paper, colours.accent) >= 4.5);
    for (const ground of ["added", "removed"]) assert.ok(contrast(colours.ink, colours[ground]) >= 4.5);
  });
}
