// Several runs side by side: their losses in one chart, their figures, and the settings that differ.
import { Chart, legendOf } from "./charts.js";
import { clock, fill, h, number, percent, seconds, table } from "./dom.js";

export class ComparePage {
  constructor(options) {
    this.options = options; // {open(number), back}
    this.isTime = false;
    this.loss = new Chart({ title: "Loss", height: 280 });
    this.speed = new Chart({ title: "Samples a second", height: 190, zero: true });
    this.figures = h("section", { class: "card" });
    this.legend = h("div");
    this.settings = h("section", { class: "card" });
    this.button = h("button", { "aria-pressed": "false", onclick: () => this.toggle() }, "over time");
    this.element = h("div", null, options.back ? h("p", null, h("a", { href: "#/" }, "All runs")) : null,
      h("h1", null, "Runs side by side"),
      h("section", { class: "card" }, h("div", { class: "bar" }, h("h2", null, "Curves"), h("div", { class: "buttons" }, this.button)), this.legend, this.loss.element, this.speed.element),
      this.figures, this.settings);
  }

  toggle() {
    this.isTime = !this.isTime;
    this.button.setAttribute("aria-pressed", String(this.isTime));
    this.update(this.views, this.differences);
  }

  update(views, differences) {
    this.views = views;
    this.differences = differences;
    const axis = this.isTime
      ? { kind: "time", format: (x) => seconds(Math.max(0, x)), label: (x) => `${seconds(x)} in` }
      : { kind: "step", format: (x) => number(x, 6), label: (x) => `step ${x}` };
    for (const [chart, name] of [[this.loss, "loss"], [this.speed, "samples/s"]]) {
      const [values, columns] = joined(views, name, this.isTime);
      chart.show({ ...axis, values }, views.map((view, i) => ({ label: view.name, mean: columns[i] })));
    }
    fill(this.legend, legendOf(views.map((view) => ({ label: view.name }))));
    const names = views.map((view, i) => h("a", { href: `#/${i}`, onclick: (event) => { event.preventDefault(); this.options.open(i); } }, view.name));
    fill(this.figures, h("h2", null, "Figures"), h("div", { class: "wide words" }, table(
      ["run", "state", "plan", "#step", "#loss", "#samples/s", "#goodput", "#time", "#incidents", "bottleneck"],
      views.map((view, i) => [names[i], view.state, h("code", null, view.plan), number(view.step, 9), number(view.loss), number(view.totals.samples_per_s, 3),
        percent(view.totals.goodput), seconds(view.totals.wall_s), number(view.num_incidents), view.bottleneck.sentence]))));
    fill(this.settings, h("h2", null, "Settings that differ"), differences.length
      ? h("div", { class: "wide" }, table(["setting", ...views.map((view) => view.name)], differences.map((row) => [h("code", null, row.name), ...row.values.map((value) => h("code", null, value === null ? "–" : value))])))
      : h("p", { class: "quiet" }, "None."));
  }
}

// The curves of all runs over one axis: where a run has no point there is a gap, which is drawn through.
function joined(views, name, isTime) {
  const columns = views.map((view) => {
    const began = view.began_at || view.curves.time[0] || 0;
    const at = isTime ? view.curves.time.map((time) => time - began) : view.curves.step;
    const figure = view.curves.figures[name];
    return new Map(figure ? at.map((x, i) => [x, figure.mean[i]]) : []);
  });
  const values = [...new Set(columns.flatMap((column) => [...column.keys()]))].sort((a, b) => a - b);
  return [values, columns.map((column) => values.map((x) => (column.has(x) ? column.get(x) : null)))];
}
