// The start of a report: its data are in the file itself.
import { ComparePage } from "./compare.js";
import { fill, h } from "./dom.js";
import { RunPage } from "./run.js";

const report = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("main");

function showReport(number) {
  const run = number === null ? null : report.runs[number];
  if (run) {
    const page = new RunPage();
    const back = report.runs.length > 1 ? h("p", null, h("a", { href: "#", onclick: (event) => { event.preventDefault(); showReport(null); } }, "All runs of this report")) : null;
    fill(main, back, page.element, h("footer", null, `${report.made}. One file, which needs no network.`));
    page.update(run);
    document.title = `${run.name} · Shoal`;
  } else {
    const page = new ComparePage({ open: showReport });
    fill(main, page.element, h("footer", null, `${report.made}. One file, which needs no network.`));
    page.update(report.runs, report.differences);
  }
  scrollTo(0, 0);
}

showReport(report.runs.length === 1 ? 0 : null);
