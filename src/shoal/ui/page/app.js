// The live page: a list of runs, one run, or several side by side; the address after # says which.
import { ComparePage } from "./compare.js";
import { clock, fill, h, number, setText, table } from "./dom.js";
import { RunPage } from "./run.js";

const given = new URLSearchParams(location.search).get("token");
if (given) {
  sessionStorage.setItem("token", given);
  history.replaceState(null, "", `/${location.hash}`); // the token stays out of sight
}
const token = sessionStorage.getItem("token") || "";
const main = document.getElementById("main");
const live = h("span", { class: "quiet", role: "status" });
let stream = null;
let canControl = false;

async function get(path) {
  const answer = await fetch(path, { headers: { authorization: `Bearer ${token}` } });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

// Calls `show` with each newer state; says when the server is gone, and tries again.
function watch(query, show) {
  if (stream) stream.close();
  const own = new EventSource(`/api/stream?token=${encodeURIComponent(token)}${query}`);
  stream = own;
  own.onmessage = (event) => {
    if (stream !== own) return;
    const found = JSON.parse(event.data);
    if (found.error) return fail(found.error);
    setText(live, "live");
    show(found);
  };
  own.onerror = () => setText(live, "not connected; what is shown may be old");
}

function fail(message) {
  fill(main, h("h1", null, "Shoal"), h("div", { class: "card notice", role: "alert" }, h("p", null, message)), h("p", null, h("a", { href: "#/" }, "All runs")));
}

function showList() {
  const chosen = new Set();
  const search = h("input", { type: "search", placeholder: "Filter", "aria-label": "Filter runs", oninput: () => draw() });
  const compare = h("button", { disabled: true, onclick: () => { location.hash = `#/compare?${[...chosen].map((id) => `run=${encodeURIComponent(id)}`).join("&")}`; } }, "Compare");
  const rows = h("div", { class: "wide lines" });
  const more = h("div");
  const about = h("p", { class: "quiet mono" });
  fill(main, h("div", { class: "head" }, h("h1", null, "Runs"), live), about,
    h("section", { class: "card" }, h("div", { class: "bar" }, search, compare), rows), more);
  let found = null;
  const draw = () => {
    if (!found) return;
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const runs = found.runs.filter((run) => words.every((word) => `${run.name} ${run.state} ${run.recipe} ${run.plan}`.toLowerCase().includes(word)));
    const pick = (run) => h("input", { type: "checkbox", "aria-label": `Compare ${run.name}`, checked: chosen.has(run.id), onchange: (event) => {
      if (event.target.checked) chosen.add(run.id); else chosen.delete(run.id);
      compare.disabled = chosen.size < 2;
    } });
    fill(rows, runs.length ? table(["", "run", "state", "#step", "#loss", "plan", "recipe", "changed"], runs.slice(0, 500).map((run) => [
      pick(run), h("a", { href: `#/run?id=${encodeURIComponent(run.id)}` }, run.name === "." ? found.directory : run.name),
      h("span", { class: `pill ${run.state}`, title: run.reason }, run.state),
      run.num_steps ? `${number(run.step, 9)} of ${number(run.num_steps, 9)}` : number(run.step, 9), number(run.loss),
      h("code", null, run.plan || "–"), h("code", null, run.recipe || "–"), clock(run.changed_at)]), "Runs") : h("p", { class: "quiet" }, found.runs.length ? "No run matches." : "There are no runs here yet."),
    runs.length > 500 ? h("p", { class: "quiet" }, `${runs.length - 500} more; filter to see them.`) : null);
  };
  watch("", (listing) => {
    found = listing;
    canControl = listing.can_control;
    setText(about, `${listing.directory} · ${listing.runs.length} runs`);
    draw();
    fill(more, ...listing.problems.map((text) => h("div", { class: "card notice" }, text)), studiesOf(listing), queueOf(listing));
  });
}

function studiesOf(listing) {
  if (!listing.studies.length) return null;
  return h("section", { class: "card" }, h("h2", null, "Studies"), h("div", { class: "wide lines" }, table(["study", "metric", "#best", "best trial", "#finished", "#pruned", "#failed", "recipe"],
    listing.studies.map((study) => {
      const count = (state) => study.trials.filter((trial) => trial[1] === state).length;
      const best = study.best_trial === null ? "–" : h("a", { href: `#/run?id=${encodeURIComponent(`${study.id === "." ? "" : study.id + "/"}trials/${String(study.best_trial).padStart(4, "0")}`)}` }, `trial ${study.best_trial}`);
      return [study.problem ? `${study.id}: ${study.problem}` : study.id, study.metric, number(study.best), best,
        number(study.finished), number(count("pruned")), number(count("failed")), h("code", null, study.recipe)];
    }))));
}

function queueOf(listing) {
  if (!listing.queue.length) return null;
  return h("section", { class: "card" }, h("h2", null, "Queue"), h("div", { class: "wide lines" }, table(["job", "state", "name", "run directory", "why"],
    listing.queue.map((job) => [job.job, job.state, job.name, h("code", null, job.run_dir), job.reason || "–"]))));
}

function showRun(id) {
  const page = new RunPage({ back: true, control: (box, view) => drawControls(box, view, id) });
  fill(main, page.element, h("footer", null, live));
  get("/api/runs").then((listing) => { canControl = listing.can_control; }, () => {});
  let title = "";
  watch(`&run=${encodeURIComponent(id)}`, (view) => {
    title = `${view.num_steps ? `${Math.floor((100 * view.step) / view.num_steps)} % ` : ""}${view.name} · Shoal`;
    if (document.title !== title) document.title = title;
    page.update(view);
  });
}

function drawControls(box, view, id) {
  const isShown = canControl && view.state === "running";
  if (!isShown) return fill(box);
  if (box.firstChild) return box; // what is being typed stays
  const size = h("input", { type: "text", placeholder: "data=3", "aria-label": "Another size, such as data=3" });
  const told = h("p", { class: "quiet", role: "status" });
  const ask = async (action) => {
    setText(told, "asked …");
    const answer = await fetch("/api/control", { method: "POST", headers: { authorization: `Bearer ${token}`, "content-type": "application/json" }, body: JSON.stringify({ run: id, action, size: size.value }) });
    const found = await answer.json();
    setText(told, found.error || found.done);
  };
  return fill(box, h("section", { class: "card" }, h("div", { class: "bar" }, h("h2", null, "Control"),
    h("div", { class: "buttons" }, size, h("button", { onclick: () => ask("resize") }, "Resize"),
      h("button", { onclick: () => ask("save") }, "Save now"),
      h("button", { class: "danger", onclick: () => { if (confirm("Stop this run? It saves itself first, and can go on with --resume.")) ask("stop"); } }, "Stop"))), told));
}

async function showComparison(query) {
  if (stream) stream.close();
  const page = new ComparePage({ back: true, open: (i) => { location.hash = `#/run?id=${encodeURIComponent(ids[i])}`; } });
  const ids = new URLSearchParams(query).getAll("run");
  fill(main, page.element);
  const found = await get(`/api/compare?${query}`);
  page.update(found.runs, found.differences);
}

async function route() {
  const [place, query] = location.hash.slice(2).split("?");
  try {
    document.title = "Shoal";
    scrollTo(0, 0);
    if (place === "run") showRun(new URLSearchParams(query).get("id") || ".");
    else if (place === "compare") await showComparison(query || "");
    else {
      const listing = await get("/api/runs");
      canControl = listing.can_control;
      if (listing.runs.length === 1 && listing.runs[0].id === ".") showRun(".");
      else showList();
    }
  } catch (error) {
    fail(error.message);
  }
}

addEventListener("hashchange", route);
route();
