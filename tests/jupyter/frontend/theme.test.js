import assert from "node:assert/strict";
import { test } from "node:test";

import { isDark, relativeLuminance, themedLayout } from "../../../memexplore/jupyter/frontend/theme.js";

const NONE = { attributes: {}, classes: [] };

/** A page with marks on `body` and `html`, on a white background, of a person who prefers light colours. */
function page({ body = NONE, html = NONE, background = "rgb(255, 255, 255)", prefersDark = false }) {
  return { elements: [body, html], background, prefersDark };
}

const attribute = (name, value) => ({ attributes: { [name]: value }, classes: [] });
const ofClass = (...classes) => ({ attributes: {}, classes });

test("JupyterLab's attribute decides, on body and on html", () => {
  for (const place of ["body", "html"]) {
    assert.ok(isDark(page({ [place]: attribute("data-jp-theme-light", "false") })));
    assert.ok(!isDark(page({ [place]: attribute("data-jp-theme-light", "true"), background: "rgb(0, 0, 0)" })));
  }
});

test("VS Code's kinds and classes decide", () => {
  assert.ok(isDark(page({ body: attribute("data-vscode-theme-kind", "vscode-dark") })));
  assert.ok(isDark(page({ body: ofClass("vscode-high-contrast") })));
  assert.ok(!isDark(page({ body: ofClass("vscode-high-contrast-light"), prefersDark: true })));
  assert.ok(!isDark(page({ body: ofClass("vscode-light"), prefersDark: true })));
});

test("marks of other pages decide before the background", () => {
  assert.ok(isDark(page({ html: attribute("theme", "dark") }))); // Colab
  assert.ok(isDark(page({ html: attribute("data-theme", "dark") })));
  assert.ok(isDark(page({ html: ofClass("app", "dark") }))); // marimo
  assert.ok(!isDark(page({ body: ofClass("light"), background: "rgb(0, 0, 0)" })));
});

test("a word that only contains dark is not a mark", () => {
  assert.ok(!isDark(page({ body: ofClass("darkroom", "sidebar-darkness") })));
});

test("the background decides before the preference", () => {
  assert.ok(!isDark(page({ prefersDark: true })));
  assert.ok(isDark(page({ background: "rgb(17, 17, 17)" })));
  assert.ok(isDark(page({ background: null, prefersDark: true })));
});

test("luminance of white, black and transparent", () => {
  assert.equal(relativeLuminance("rgb(255, 255, 255)").toFixed(9), "1.000000000");
  assert.equal(relativeLuminance("rgb(0, 0, 0)"), 0);
  assert.equal(relativeLuminance("rgba(0, 0, 0, 0)"), null);
});

test("a figure keeps its font and takes the page's colour", () => {
  const layout = themedLayout({ font: { size: 12, color: "red" }, width: 7 }, "rgb(1, 2, 3)");
  assert.deepEqual([layout.font, layout.width], [{ size: 12, color: "rgb(1, 2, 3)" }, 7]);
});
