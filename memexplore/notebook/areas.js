// The areas and lines of a timeline, on a canvas behind plotly's axes, and its legend. For the same traces (ResNet-50, 1,180
// rows) plotly takes 16 ms and the canvas 1 to 3 (headless Chromium, drawing in software).

const DASH = 9; // pixels: what plotly draws for "dash"
const EDGE = 8; // pixels around the plot, for the mark of a peak at its border

class Areas {
  constructor(graph) {
    this.graph = graph;
    this.canvas = element("canvas", "areas");
    this.legend = element("div", "legend");
    this.traces = [];
    this.hidden = new Set(); // names that were switched off
  }

  take(traces) {
    this.traces = traces;
    const listed = traces.filter((trace) => trace.showlegend !== false);
    // As plotly orders them.
    listed.sort((one, other) => (one.legendrank ?? 1000) - (other.legendrank ?? 1000));
    const focused = [...this.legend.children].indexOf(document.activeElement);
    this.legend.replaceChildren(...listed.map((trace) => this.entry(trace)));
    this.legend.children[focused]?.focus();
  }

  entry({ name, stackgroup, fillcolor, line }) {
    const button = element("button", "entry", name);
    const swatch = element("span", stackgroup ? "swatch" : "stroke");
    if (stackgroup) swatch.style.background = fillcolor;
    else swatch.style.borderTop = `${line.width}px ${line.dash === "dash" ? "dashed" : "solid"} ${line.color}`;
    button.prepend(swatch);
    button.title = `Hide ${name}, or show it again`;
    button.setAttribute("aria-pressed", String(!this.hidden.has(name)));
    button.addEventListener("click", () => {
      if (!this.hidden.delete(name)) this.hidden.add(name);
      button.setAttribute("aria-pressed", String(!this.hidden.has(name)));
      this.draw();
    });
    return button;
  }

  // Where plotly's axes are by now, in the middle of a drag too.
  draw() {
    const { xaxis, yaxis } = this.graph._fullLayout;
    const [left, top, width, height] = [xaxis._offset, yaxis._offset, xaxis._length, yaxis._length];
    const scale = globalThis.devicePixelRatio || 1;
    const [wide, high] = [Math.round((width + 2 * EDGE) * scale), Math.round((height + 2 * EDGE) * scale)];
    const { canvas, legend } = this;
    if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
    Object.assign(canvas.style, { left: `${left - EDGE}px`, top: `${top - EDGE}px` });
    Object.assign(canvas.style, { width: `${width + 2 * EDGE}px`, height: `${height + 2 * EDGE}px` });
    Object.assign(legend.style, { left: `${left}px`, width: `${width}px` });
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width + 2 * EDGE, height + 2 * EDGE);
    const [low, last] = xaxis.range;
    const place = {
      x: (row) => EDGE + ((row - low) / (last - low)) * width,
      y: (bytes) => EDGE + (1 - bytes / yaxis.range[1]) * height,
    };
    const shown = this.traces.filter(({ name }) => !this.hidden.has(name));
    pen.save();
    pen.beginPath();
    pen.rect(EDGE, EDGE, width, height);
    pen.clip();
    const stacks = new Map();
    for (const trace of shown) if (trace.stackgroup) fill(pen, place, trace, stacks);
    for (const trace of shown) if (!trace.stackgroup && trace.mode === "lines") stroke(pen, place, trace);
    pen.restore();
    for (const trace of shown) if (trace.mode === "markers") mark(pen, place, trace);
  }
}

// Each row's value holds until the next row; what stays the same needs no corner.
function steps(pen, xs, ys) {
  for (let at = 1; at < xs.length; at += 1) {
    if (ys[at] === ys[at - 1] && at < xs.length - 1) continue;
    pen.lineTo(xs[at], ys[at - 1]);
    pen.lineTo(xs[at], ys[at]);
  }
}

function stepsBack(pen, xs, ys) {
  for (let at = xs.length - 1; at > 0; at -= 1) {
    if (ys[at] === ys[at - 1] && at > 1) continue;
    pen.lineTo(xs[at], ys[at]);
    pen.lineTo(xs[at], ys[at - 1]);
  }
  pen.lineTo(xs[0], ys[0]);
}

function fill(pen, place, { x, y, stackgroup, fillcolor }, stacks) {
  if (!x.length) return;
  if (!stacks.has(stackgroup)) {
    const bottom = Float64Array.from(x, () => place.y(0));
    stacks.set(stackgroup, { xs: Float64Array.from(x, place.x), sums: new Float64Array(x.length), bottom });
  }
  const stack = stacks.get(stackgroup);
  for (let at = 0; at < y.length; at += 1) stack.sums[at] += y[at];
  const top = Float64Array.from(stack.sums, place.y);
  pen.beginPath();
  pen.moveTo(stack.xs[0], top[0]);
  steps(pen, stack.xs, top);
  pen.lineTo(stack.xs[x.length - 1], stack.bottom[x.length - 1]);
  stepsBack(pen, stack.xs, stack.bottom);
  pen.closePath();
  pen.fillStyle = fillcolor;
  pen.fill();
  stack.bottom = top;
}

function stroke(pen, place, { x, y, line }) {
  if (!x.length) return;
  const [xs, ys] = [Float64Array.from(x, place.x), Float64Array.from(y, place.y)];
  pen.beginPath();
  pen.moveTo(xs[0], ys[0]);
  steps(pen, xs, ys);
  pen.strokeStyle = line.color;
  pen.lineWidth = line.width;
  pen.setLineDash(line.dash === "dash" ? [DASH, DASH] : []);
  pen.stroke();
}

function mark(pen, place, { x, y, marker }) {
  if (!x.length) return;
  pen.beginPath();
  pen.arc(place.x(x[0]), place.y(y[0]), marker.size / 2, 0, 2 * Math.PI);
  pen.fillStyle = marker.color;
  pen.fill();
  pen.strokeStyle = marker.line.color;
  pen.lineWidth = marker.line.width;
  pen.stroke();
}

