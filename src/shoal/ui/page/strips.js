// One strip a worker over the time of the run: what it did, from bottom to top, and when it was gone.
import { css, h, percent, seconds, setText, table } from "./dom.js";

export const KINDS = ["compute", "exchange", "data", "waiting"];
export const NAMES = { compute: "compute", exchange: "exchange", data: "data", waiting: "waiting", gone: "dead" };

export class StripChart {
  constructor() {
    this.canvas = h("canvas", { role: "img" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.text = h("div", { class: "wide" });
    this.box = h("div", { class: "strips" }, this.canvas, this.tip);
    this.element = h("div", null, h("div", { class: "scroll" }, this.box),
      h("ul", { class: "legend" }, ...Object.entries(NAMES).map(([kind, name]) => h("li", { class: `swatch-${kind}` }, name))),
      h("details", null, h("summary", null, "In figures"), this.text));
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("mouseleave", () => { this.tip.hidden = true; });
    new ResizeObserver(() => this.draw()).observe(this.box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  show(view) {
    this.view = view;
    this.draw();
    const workers = view.strips.workers;
    this.canvas.setAttribute("aria-label", `What ${workers.length} workers did over time. ` +
      workers.slice(0, 16).map((worker) => workerInWords(worker)).join(" "));
    this.text.replaceChildren(table(["worker", "host", "process", "#compute", "#exchange", "#data", "#waiting", "dead"],
      workers.map((worker) => [worker.name, worker.host, worker.pid || "–",
        ...KINDS.map((kind) => seconds(worker.totals[kind])), goneInWords(worker, view)])));
  }

  span() {
    const { strips, began_at: began, seen_at: seen } = this.view;
    const from = began || strips.begin[0] || 0;
    return [from, Math.max(seen || 0, strips.end[strips.end.length - 1] || 0, from + 1e-3)];
  }

  draw() {
    const width = this.box.clientWidth;
    if (!this.view || !width) return;
    const { strips } = this.view;
    const count = strips.workers.length;
    const row = count > 40 ? 9 : count > 16 ? 13 : 20;
    const gap = count > 40 ? 2 : 4;
    this.row = row + gap;
    this.left = count > 40 ? 56 : 70;
    const height = count * this.row + 22;
    const scale = devicePixelRatio || 1;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.height = `${height}px`;
    const ctx = this.canvas.getContext("2d");
    ctx.scale(scale, scale);
    ctx.font = `${Math.min(12, row)}px system-ui`;
    ctx.textBaseline = "middle";
    const [from, to] = this.span();
    const wide = width - this.left - 4;
    const at = (time) => this.left + (wide * (time - from)) / (to - from);
    const colours = Object.fromEntries(Object.keys(NAMES).map((kind) => [kind, css(`--${kind}`)]));
    const [ground, ink, quiet] = [css("--line"), css("--ink"), css("--quiet")];
    strips.workers.forEach((worker, number) => {
      const top = number * this.row;
      ctx.fillStyle = worker.is_alive ? ink : colours.gone;
      ctx.fillText(worker.name, 0, top + row / 2 + 1);
      ctx.fillStyle = ground;
      ctx.globalAlpha = 0.4;
      ctx.fillRect(this.left, top, wide, row);
      ctx.globalAlpha = 1;
      for (let i = 0; i < strips.begin.length; i++) {
        const x = at(strips.begin[i]);
        const across = Math.max(0.6, at(strips.end[i]) - x + 0.3);
        let bottom = top + row;
        for (const kind of KINDS) {
          const level = worker.shares[kind] ? worker.shares[kind].charCodeAt(i) - 48 : 0;
          if (level <= 0) continue;
          const tall = (row * level) / 64;
          ctx.fillStyle = colours[kind];
          ctx.fillRect(x, bottom - tall, across, tall);
          bottom -= tall;
        }
      }
      ctx.fillStyle = colours.gone;
      for (const [begin, end] of worker.gone) {
        const x = at(begin);
        ctx.fillRect(x, top, Math.max(2, at(end === null ? to : end) - x), row);
      }
    });
    ctx.fillStyle = quiet;
    ctx.font = "11px system-ui";
    const ticks = Math.max(2, Math.min(6, Math.floor(wide / 110)));
    for (let i = 0; i <= ticks; i++) {
      const time = from + ((to - from) * i) / ticks;
      ctx.textAlign = i === 0 ? "left" : i === ticks ? "right" : "center";
      ctx.fillText(i === 0 ? "0" : seconds(time - from), at(time), height - 9);
    }
    ctx.textAlign = "left";
  }

  point(event) {
    const place = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - place.left, event.clientY - place.top];
    const { strips } = this.view;
    const worker = strips.workers[Math.floor(y / this.row)];
    if (!worker || x < this.left) {
      this.tip.hidden = true;
      return;
    }
    const [from, to] = this.span();
    const time = from + ((to - from) * (x - this.left)) / (place.width - this.left - 4);
    const gone = worker.gone.some(([begin, end]) => time >= begin - (to - from) / place.width && time <= (end === null ? to : end) + (to - from) / place.width);
    const i = strips.begin.findIndex((begin, k) => time >= begin && time <= strips.end[k]);
    const shares = i < 0 || !worker.shares.compute ? "" : KINDS.map((kind) => [kind, (worker.shares[kind].charCodeAt(i) - 48) / 64])
      .filter(([, share]) => share > 0).map(([kind, share]) => `${NAMES[kind]} ${percent(share)}`).join(", ");
    setText(this.tip, `${worker.name}, ${seconds(time - from)} in: ${gone ? "dead" : shares || "no step"}`);
    this.tip.hidden = false;
    this.tip.style.left = `${Math.min(x + 12, place.width - 200)}px`;
    this.tip.style.top = `${y + 14}px`;
  }
}

function times(count) {
  return count === 1 ? "once" : `${count} times`;
}

function workerInWords(worker) {
  const total = KINDS.reduce((sum, kind) => sum + (worker.totals[kind] || 0), 0);
  const shares = total ? KINDS.map((kind) => `${NAMES[kind]} ${percent(worker.totals[kind] / total)}`).join(", ") : "no steps";
  return `${worker.name}: ${shares}${worker.gone.length ? `, dead ${times(worker.gone.length)}` : ""}.`;
}

function goneInWords(worker, view) {
  if (!worker.gone.length) return "–";
  const lost = worker.gone.reduce((sum, [begin, end]) => sum + ((end === null ? view.seen_at : end) - begin), 0);
  return `${times(worker.gone.length)}, ${seconds(lost)}${worker.is_alive ? "" : ", now"}`;
}
