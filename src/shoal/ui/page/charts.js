// Curves, drawn by uPlot: a line with the band of its extremes, and what happened as vertical lines.
// Each chart has its figures in words too, and arrow keys move its cursor.
import { clock, css, h, number, seconds, setText } from "./dom.js";

const COLOURS = ["--accent", "--exchange", "--data", "--gone", "--compute", "--quiet"];
const GRADES = { bad: "--bad", warn: "--warn", good: "--good", info: "--info", save: "--quiet" };

export class Chart {
  // `lines`: [{label, mean, low, high, colour}] of equal length; `options`: {title, format, zero, height}
  constructor(options) {
    this.options = options;
    this.readout = h("span", { class: "readout", "aria-hidden": "true" });
    this.words = h("p", { class: "hidden" });
    this.box = h("div", { class: "chart" });
    this.element = h("figure", { tabindex: "0", onkeydown: (event) => this.key(event) },
      h("figcaption", null, h(options.level || "h3", null, options.title), this.readout), this.box, this.words);
    this.plot = null;
    this.shape = "";
    new ResizeObserver(() => this.resize()).observe(this.box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw(true));
  }

  show(axis, lines, marks = []) {
    this.axis = axis;
    this.lines = lines;
    this.marks = marks;
    this.draw(false);
    setText(this.words, chartInWords(this.options.title, axis, lines));
  }

  draw(isAnew) {
    if (!this.lines || typeof uPlot === "undefined") {
      if (typeof uPlot === "undefined") setText(this.box, "The chart library is not installed: run `make setup` where npm is, and write the report again.");
      return;
    }
    const data = [this.axis.values];
    for (const line of this.lines) {
      if (line.low && line.low.length) data.push(line.low, line.high);
      data.push(line.mean);
    }
    const shape = JSON.stringify([this.lines.map((line) => [line.label, Boolean(line.low && line.low.length)]), this.axis.kind, this.options.isLog]);
    if (this.plot && !isAnew && shape === this.shape) {
      this.plot.setData(data);
      return;
    }
    this.shape = shape;
    if (this.plot) this.plot.destroy();
    if (!this.box.clientWidth) return;
    this.plot = new uPlot(this.settings(), data, this.box);
  }

  settings() {
    const series = [{}];
    const bands = [];
    this.lines.forEach((line, i) => {
      const stroke = css(line.colour || COLOURS[i % COLOURS.length]);
      if (line.low && line.low.length) {
        const at = series.length;
        const edge = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
        series.push(edge, { ...edge });
        bands.push({ series: [at + 1, at], fill: stroke + "2e" });
      }
      series.push({ stroke, width: line.isFaint ? 1 : 1.8, dash: line.dash, spanGaps: true, points: { show: line.hasPoints, size: 5 } });
    });
    const axis = { stroke: css("--quiet"), font: "11px system-ui", grid: { stroke: css("--line"), width: 1 }, ticks: { show: false } };
    const format = this.options.format || number;
    return {
      width: this.box.clientWidth, height: this.options.height || 170, series, bands,
      padding: [8, 18, 0, 0],
      scales: { x: { time: false }, y: { distr: this.options.isLog ? 3 : 1, range: this.options.isLog ? undefined : (u, low, high) => room(low, high, this.options.zero) } },
      axes: [
        { ...axis, size: 26, space: 70, values: (u, ticks) => ticks.map((tick) => this.axis.format(tick)) },
        { ...axis, size: 58, space: 34, values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : format(tick, 3))) },
      ],
      cursor: { sync: { key: "shoal" }, points: { size: 6 }, drag: { x: true, y: false } },
      legend: { show: false },
      hooks: { draw: [(u) => this.drawMarks(u)], setCursor: [(u) => this.read(u)] },
    };
  }

  drawMarks(u) {
    const { ctx, bbox } = u;
    ctx.save();
    for (const mark of this.marks) {
      if (mark.x === null || mark.x === undefined) continue;
      const x = Math.round(u.valToPos(mark.x, "x", true)) + 0.5;
      if (x < bbox.left || x > bbox.left + bbox.width + 1) continue;
      ctx.strokeStyle = css(GRADES[mark.grade]);
      ctx.fillStyle = ctx.strokeStyle;
      ctx.globalAlpha = mark.grade === "save" ? 0.5 : 0.85;
      ctx.lineWidth = devicePixelRatio;
      ctx.beginPath();
      if (mark.grade === "save") {
        ctx.moveTo(x, bbox.top + bbox.height);
        ctx.lineTo(x, bbox.top + bbox.height - 7 * devicePixelRatio);
      } else {
        ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
      }
      ctx.stroke();
      ctx.setLineDash([]);
      if (mark.grade !== "save") {
        ctx.beginPath();
        ctx.arc(x, bbox.top + 4 * devicePixelRatio, 3 * devicePixelRatio, 0, 7);
        ctx.fill();
      }
    }
    ctx.restore();
  }

  read(u) {
    const i = u.cursor.idx;
    if (i === null || i === undefined) return setText(this.readout, this.last || "");
    const format = this.options.format || number;
    const parts = this.lines.filter((line) => line.mean[i] !== null && line.mean[i] !== undefined)
      .map((line) => `${this.lines.length > 1 ? line.label + " " : ""}${format(line.mean[i])}`);
    const x = this.axis.values[i];
    const near = this.marks.filter((mark) => mark.grade !== "save" && Math.abs(u.valToPos(mark.x, "x") - u.cursor.left) < 6);
    const happened = near.length ? ` · ${near[near.length - 1].what}` : "";
    setText(this.readout, `${this.axis.label(x)}: ${parts.join(", ")}${happened}`);
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!move || !this.plot) return;
    event.preventDefault();
    const most = this.axis.values.length - 1;
    const from = this.plot.cursor.idx === null || this.plot.cursor.idx === undefined ? most : this.plot.cursor.idx;
    const to = Math.max(0, Math.min(most, from + move));
    this.plot.setCursor({ left: this.plot.valToPos(this.axis.values[to], "x"), top: 10 });
  }

  resize() {
    if (!this.plot) return this.draw(true);
    if (this.box.clientWidth) this.plot.setSize({ width: this.box.clientWidth, height: this.options.height || 170 });
  }
}

export function legendOf(lines) {
  return h("ul", { class: "legend" }, ...lines.map((line, i) => {
    const made = h("li", null, line.label);
    made.style.setProperty("--swatch", `var(${line.colour || COLOURS[i % COLOURS.length]})`);
    return made;
  }));
}

function room(low, high, isFromZero) {
  if (low === null || high === null || low === undefined) return [0, 1];
  if (isFromZero) low = Math.min(0, low);
  if (low === 0 && high === 0) return [0, 1];
  const more = (high - low || Math.abs(high) || 1) * 0.08;
  return [isFromZero && low === 0 ? 0 : low - more, high + more];
}

// The axis of a run's curves: steps, or seconds since it began.
export function axisOf(view, isTime) {
  const began = view.began_at || view.curves.time[0] || 0;
  if (!isTime) return { kind: "step", values: view.curves.step, format: (x) => number(x, 6), label: (x) => `step ${x}` };
  return {
    kind: "time", values: view.curves.time.map((time) => time - began), format: (x) => seconds(Math.max(0, x)),
    label: (x) => `${seconds(x)} in (${clock(began + x)})`,
  };
}

function chartInWords(title, axis, lines) {
  const told = lines.map((line) => {
    const known = line.mean.map((value, i) => [value, i]).filter(([value]) => value !== null && value !== undefined);
    if (!known.length) return `${line.label}: no values`;
    const least = known.reduce((a, b) => (b[0] < a[0] ? b : a));
    const [first, last] = [known[0], known[known.length - 1]];
    return `${line.label}: ${number(first[0])} at ${axis.label(axis.values[first[1]])}, ${number(last[0])} at ${axis.label(axis.values[last[1]])}, least ${number(least[0])} at ${axis.label(axis.values[least[1]])}`;
  });
  return `${title}. ${told.join(". ")}.`;
}
