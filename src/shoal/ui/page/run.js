// The page of one run: built once, then filled again with each newer view of it.
import { Chart, axisOf, legendOf } from "./charts.js";
import { bytes, clock, fill, h, number, percent, seconds, setText, table } from "./dom.js";
import { KINDS, NAMES, StripChart } from "./strips.js";

const STATES = { queued: "waits", running: "running", stopped: "stopped", done: "done", failed: "failed", unreadable: "not readable" };
const MARKED = ["exited", "recovered", "resized", "balanced", "host-lost", "host-added", "resumed", "gave-up", "standstill",
  "slow", "replica-repaired", "replicas-differ", "state-corrupted", "stopping", "ended-early", "save-failed", "hang"];

const MARKS = [{ grade: "bad", label: "failure", colour: "--bad" }, { grade: "warn", label: "warning", colour: "--warn" },
  { grade: "good", label: "recovered", colour: "--good" }, { grade: "info", label: "note", colour: "--info" }, { grade: "save", label: "saved", colour: "--quiet" }];

export class RunPage {
  constructor(options = {}) {
    this.options = options; // {back, control(view) -> element}
    this.isTime = false;
    this.isLog = false;
    this.head = h("div");
    this.notice = h("div");
    this.verdict = h("section", { class: "card", "aria-label": "Bottleneck" });
    this.loss = new Chart({ title: "Loss and what happened", height: 260, level: "h2" });
    this.strips = new StripChart();
    this.small = h("div", { class: "grid" });
    this.charts = new Map();
    this.rest = h("div");
    this.timeButton = h("button", { "aria-pressed": "false", onclick: () => this.toggle("isTime", this.timeButton) }, "over time");
    this.logButton = h("button", { "aria-pressed": "false", onclick: () => this.toggle("isLog", this.logButton) }, "log scale");
    this.controls = h("div");
    this.lossLegend = h("div");
    this.curves = h("section", { class: "card" }, this.loss.element, h("div", { class: "bar" }, this.lossLegend,
      h("div", { class: "buttons" }, this.timeButton, this.logButton)));
    this.workers = h("section", { class: "card" }, h("h2", null, "Workers"),
      h("p", { class: "quiet" }, "What each one did with its time, as it says itself. A server computes while its processor is busy, and waits else."), this.strips.element);
    this.element = h("div", null, this.head, this.notice, this.controls, this.verdict,
      this.curves,
      this.workers, this.small, this.rest);
  }

  toggle(name, button) {
    this[name] = !this[name];
    button.setAttribute("aria-pressed", String(this[name]));
    this.loss.options.isLog = this.isLog;
    this.update(this.view);
  }

  update(view) {
    this.view = view;
    fill(this.head, ...headOf(view, this.options.back));
    fill(this.notice, view.problems.length && view.state !== "unreadable"
      ? h("div", { class: "card notice", role: "status" }, ...view.problems.map((text) => h("p", null, text))) : null);
    if (this.options.control) this.options.control(this.controls, view);
    fill(this.verdict, ...verdictOf(view));
    this.drawCurves(view);
    this.workers.hidden = !view.strips.workers.length;
    if (!this.workers.hidden) this.strips.show(view);
    this.fillRest(view);
    if (!performance.getEntriesByName("shown").length) performance.mark("shown");
  }

  drawCurves(view) {
    const axis = axisOf(view, this.isTime);
    const marks = marksOf(view, this.isTime);
    const figures = view.curves.figures;
    const lossLines = [];
    if (figures.loss) lossLines.push({ label: "training", ...figures.loss });
    if (figures["evaluation/loss"]) lossLines.push({ label: "evaluation", mean: figures["evaluation/loss"].mean, hasPoints: true, colour: "--data" });
    this.curves.hidden = !view.curves.step.length;
    if (!this.curves.hidden) this.loss.show(axis, lossLines, marks);
    const grades = new Set(marks.map((mark) => mark.grade));
    fill(this.lossLegend, legendOf([...lossLines, ...MARKS.filter((one) => grades.has(one.grade))]));
    const shown = new Map();
    const add = (title, lines, options = {}) => { if (lines.some((line) => line.mean && line.mean.some((v) => v !== null))) shown.set(title, [lines, options]); };
    const line = (name, label, more = {}) => ({ label: label || name, mean: [], ...figures[name], ...more });
    add("Samples a second", [line("samples/s", "measured"), line("ideal samples/s", "ideal", { dash: [4, 4], colour: "--quiet", isFaint: true })], { zero: true });
    add("Seconds of a step, rank 0", KINDS.map((kind) => line(`seconds/${kind}`, NAMES[kind], { colour: kind === "waiting" ? "--quiet" : `--${kind}` })), { zero: true, format: seconds });
    add("Bytes sent a step", [line("bytes a step", "sent")], { zero: true, format: bytes });
    for (const name of Object.keys(figures)) {
      if (name === "loss" || name === "evaluation/loss" || name.startsWith("seconds/") || ["samples/s", "ideal samples/s", "bytes a step"].includes(name)) continue;
      const title = { rate: "Learning rate", norm: "Gradient norm" }[name] || name.replace("/", ": ");
      add(title, [line(name, title, { hasPoints: name.startsWith("evaluation/") })]);
    }
    for (const host of view.hosts) addHost(shown, host, view);
    for (const [title, [lines, options]] of shown) {
      if (!this.charts.has(title)) {
        const chart = new Chart({ title, ...options });
        const card = h("section", { class: "card", "aria-label": title }, chart.element,
          lines.length > 1 ? legendOf(lines) : null);
        this.charts.set(title, chart);
        this.small.append(card);
      }
      this.charts.get(title).show(options.axis || axis, lines, options.axis ? [] : marks.filter((mark) => mark.grade !== "save"));
    }
  }

  fillRest(view) {
    const open = new Set([...this.rest.querySelectorAll("details[open]")].map((one) => one.dataset.name));
    fill(this.rest, incidentsOf(view), checkpointsOf(view), stalenessOf(view), predictedOf(view), tracesOf(view), settingsOf(view, open));
  }
}

function headOf(view, back) {
  const share = view.num_steps ? Math.min(1, view.step / view.num_steps) : 0;
  const figure = (name, value, more) => h("div", null, h("dt", null, name), h("dd", null, value, more ? h("small", null, more) : null));
  const totals = view.totals;
  const ideal = totals.ideal_samples_per_s ? `${number(totals.ideal_samples_per_s, 3)} without exchange and waiting` : "";
  return [
    back ? h("p", null, h("a", { href: "#/" }, "All runs")) : null,
    h("div", { class: "head" }, h("h1", null, view.name), h("span", { class: `pill ${view.state}` }, STATES[view.state])),
    h("p", { class: "quiet mono" }, [view.recipe, view.plan || ""].filter(Boolean).join("   ")),
    view.reason ? h("p", { class: "bad" }, view.reason) : null,
    h("section", { class: "card", "aria-label": "Figures" },
      h("div", { class: "progress", role: "progressbar", "aria-valuenow": Math.round(100 * share), "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": "steps made" }, bar(share)),
      h("dl", { class: "figures" },
        figure("Step", number(view.step, 9), view.num_steps ? `of ${number(view.num_steps, 9)}` : ""),
        figure("Loss", number(view.loss)),
        figure("Samples a second", number(totals.samples_per_s, 3), ideal),
        figure("Time", seconds(totals.wall_s), view.remaining_s !== null ? `${seconds(view.remaining_s)} left` : view.began_at ? `began ${clock(view.began_at)}` : ""),
        figure("Goodput", percent(totals.goodput), "of the time in steps"),
        figure("Sent", totals.steps ? bytes(totals.bytes_sent / totals.steps) : "–", "a step and rank"),
        view.peak_memory_bytes ? figure("Memory", bytes(view.peak_memory_bytes), "peak of a rank") : null,
        figure("Incidents", number(view.num_incidents), view.generation ? `generation ${view.generation}` : ""))),
  ];
}

function bar(share) {
  const made = h("div");
  made.style.width = `${100 * share}%`;
  return made;
}

function verdictOf(view) {
  const total = KINDS.reduce((sum, kind) => sum + (view.totals.seconds[kind] || 0), 0);
  const shares = h("div", { class: "shares", role: "img", "aria-label": total ? KINDS.map((kind) => `${NAMES[kind]} ${percent(view.totals.seconds[kind] / total)}`).join(", ") : "no steps yet" });
  for (const kind of total ? KINDS : []) {
    const part = h("span", { class: `fill swatch-${kind}`, title: `${NAMES[kind]} ${percent(view.totals.seconds[kind] / total)}` });
    part.style.flex = String(view.totals.seconds[kind] / total);
    shares.append(part);
  }
  return [
    h("h2", null, "Bottleneck"),
    h("p", { class: "verdict" }, view.bottleneck.sentence),
    shares,
    h("ul", { class: "legend" }, ...KINDS.map((kind) => h("li", { class: `swatch-${kind}` }, `${NAMES[kind]} ${total ? percent(view.totals.seconds[kind] / total) : ""}`))),
    view.bottleneck.tries.length ? h("ul", { class: "tries" }, ...view.bottleneck.tries.map((text) => h("li", null, text))) : null,
    view.compression ? h("p", { class: "quiet tries" }, `Sent: ${view.compression}.`) : null,
  ];
}

function marksOf(view, isTime) {
  const began = view.began_at || view.curves.time[0] || 0;
  const marks = view.incidents.filter((one) => MARKED.includes(one.kind)).map((one) => ({
    x: isTime ? one.time - began : one.step, grade: one.grade, what: one.what,
  }));
  if (!isTime) marks.push(...view.checkpoints.map((one) => ({ x: one.step, grade: "save", what: one.name })));
  return marks;
}

function addHost(shown, host, view) {
  const began = view.began_at || 0;
  const axis = { kind: "time", values: host.time.map((time) => time - began), format: (x) => seconds(Math.max(0, x)), label: (x) => `${seconds(x)} in` };
  const name = view.hosts.length > 1 ? ` (host ${host.host})` : "";
  const lines = (names) => names.filter(([key]) => host.figures[key]).map(([key, label]) => ({ label, mean: host.figures[key] }));
  const add = (title, names, format) => {
    const found = lines(names);
    if (found.length && found.some((line) => line.mean.some((v) => v !== null))) shown.set(title + name, [found, { axis, zero: true, format }]);
  };
  add("CPU", [["cpu_percent", "busy"]], (value) => `${number(value, 3)} %`);
  add("Memory", [["memory_bytes", "used"]], bytes);
  add("Disk, bytes a second", [["disk_read_bytes_per_s", "read"], ["disk_written_bytes_per_s", "written"]], bytes);
  add("Network, bytes a second", [["network_sent_bytes_per_s", "sent"], ["network_received_bytes_per_s", "received"]], bytes);
}

function incidentsOf(view) {
  const rows = [...view.incidents].reverse().map((one) => [
    h("span", { class: `grade ${one.grade}` }, { bad: "bad", warn: "warning", good: "good", info: "note" }[one.grade]),
    h("span", null, one.what, one.count > 1 ? ` (${one.count} times)` : ""), one.cause || "–",
    one.lost_s === null ? "–" : seconds(one.lost_s), one.step === null ? "–" : number(one.step, 9), clock(one.time)]);
  const lost = view.incidents.reduce((sum, one) => sum + (one.lost_s || 0), 0);
  return h("section", { class: "card" }, h("h2", null, "Incidents"),
    rows.length ? h("p", { class: "quiet" }, `${view.num_incidents} in all${lost ? `, ${seconds(lost)} lost` : ""}.`) : null,
    rows.length ? h("div", { class: "wide scroll words" }, table(["grade", "what", "cause", "#time lost", "#step", "when"], rows, "Incidents")) : h("p", { class: "quiet" }, "Nothing out of the ordinary happened."));
}

function checkpointsOf(view) {
  if (!view.checkpoints.length) return h("section", { class: "card" }, h("h2", null, "Checkpoints"), h("p", { class: "quiet" }, "There is none."));
  const rows = view.checkpoints.map((one) => [number(one.step, 9), bytes(one.bytes), seconds(one.ms / 1000),
    one.is_there ? command(one.resume) : h("span", { class: "quiet" }, "no longer kept")]);
  return h("section", { class: "card" }, h("h2", null, "Checkpoints"),
    h("div", { class: "wide scroll" }, table(["#step", "#size", "#took", "go on from it"], rows, "Checkpoints")));
}

function command(text) {
  const button = h("button", { "aria-label": `Copy: ${text}`, onclick: () => navigator.clipboard && navigator.clipboard.writeText(text).then(() => {
    setText(button, "copied");
    setTimeout(() => setText(button, "copy"), 1200);
  }) }, "copy");
  return h("span", null, h("code", null, text), " ", text ? button : null);
}

function stalenessOf(view) {
  const histogram = view.staleness && view.staleness.histogram;
  if (!histogram || typeof histogram !== "object") return null;
  const rows = Object.entries(histogram).map(([ahead, count]) => [Number(ahead), Number(count)]).filter(([a, c]) => Number.isFinite(a) && Number.isFinite(c)).slice(0, 200);
  const most = Math.max(1, ...rows.map(([, count]) => count));
  const bars = rows.map(([ahead, count]) => {
    const made = h("div", { title: `${ahead}: ${count}` });
    made.style.height = `${(100 * count) / most}%`;
    return made;
  });
  return h("section", { class: "card" }, h("h2", null, "Staleness"),
    h("p", { class: "quiet" }, `How many batches workers were ahead when they computed: ${number(view.staleness.mean)} in the mean, ${number(view.staleness.largest)} at most.`),
    h("div", { class: "histogram", role: "img", "aria-label": rows.map(([ahead, count]) => `${ahead} ahead: ${count} times`).join(", ") }, ...bars),
    h("div", { class: "ticks", "aria-hidden": "true" }, ...rows.map(([ahead]) => h("span", null, String(ahead)))));
}

function predictedOf(view) {
  const known = view.predicted.filter(([, before]) => before !== null);
  if (!known.length) return null;
  const [units, names] = [{ s: seconds, bytes }, { step_s: "time of a step", memory_bytes: "memory of a rank, with its part of what is shared" }];
  const rows = known.map(([name, before, after]) => {
    const shown = units[name.split("_").pop()] || number;
    return [names[name] || name, shown(before), shown(after), before && after ? `${number(after / before, 3)}x` : "–"];
  });
  return h("section", { class: "card" }, h("h2", null, "Predicted and measured"), table(["figure", "#predicted", "#measured", "#ratio"], rows));
}

function tracesOf(view) {
  if (!view.traces.length) return null;
  return h("section", { class: "card" }, h("h2", null, "Traces"), h("p", { class: "quiet" }, "Every rank's spans on one clock, for ui.perfetto.dev or chrome://tracing:"),
    ...view.traces.map((path) => h("p", null, h("code", null, path))));
}

function settingsOf(view, open) {
  const chosen = view.settings.filter((one) => one.origin !== "default");
  const value = (text) => h("code", { title: text.length > 200 ? text : null }, text.length > 200 ? `${text.slice(0, 160)} …` : text);
  const rows = (list) => list.map((one) => [h("code", { class: "whole" }, one.name), value(one.value), h("span", { class: "whole" }, one.origin)]);
  const rest = view.settings.filter((one) => one.origin === "default");
  const environment = Object.entries(view.environment);
  return h("section", { class: "card" }, h("h2", null, "Settings and where they come from"),
    chosen.length ? h("div", { class: "wide" }, table(["setting", "value", "from"], rows(chosen), "Settings")) : h("p", { class: "quiet" }, "run.json has none."),
    rest.length ? h("details", { "data-name": "defaults", open: open.has("defaults") }, h("summary", null, `${rest.length} left at their defaults`), table(["setting", "value", "from"], rows(rest))) : null,
    environment.length ? h("details", { "data-name": "environment", open: open.has("environment") }, h("summary", null, "Environment"), table(["what", "value"], environment.map(([name, value]) => [name, h("code", null, value)]))) : null,
    h("p", { class: "quiet mono" }, view.path));
}
