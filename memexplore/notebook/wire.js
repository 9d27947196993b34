// What comes from the kernel: packed answers, and plotly.js itself.

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

// Text, long ones compressed, and the numbers that it names by place and length.
async function unpack(text, numbers) {
  const bytes = new Uint8Array(text.buffer, text.byteOffset, text.byteLength);
  const content = JSON.parse(bytes[0] === 0x1f ? await unzip(text) : new TextDecoder().decode(bytes));
  // A copy: numbers of eight bytes have to begin at a multiple of eight.
  const all = new Float64Array(numbers.buffer.slice(numbers.byteOffset, numbers.byteOffset + numbers.byteLength));
  return filled(content, all);
}

function filled(value, all) {
  if (value === null || typeof value !== "object") return value;
  const { place, length } = value;
  if (place !== undefined && length !== undefined) return all.subarray(place, place + length);
  // Lists of words and numbers are what they are.
  if (!Array.isArray(value) || typeof value[0] === "object") for (const key in value) value[key] = filled(value[key], all);
  return value;
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

