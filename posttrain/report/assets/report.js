// Draws the curves of the page's data with uPlot, filters the samples, and on a live page asks for news.
"use strict";
const get = (id) => document.getElementById(id);
const make = (tag, text, name) => { const e = document.createElement(tag); if (text !== undefined) e.textContent = text;
  if (name) e.className = name; return e; };
const COLOURS = ["#1f6feb", "#d1453b", "#2da44e", "#9a5cd0", "#c77700", "#0f8b8d", "#d0478f", "#667484"];
const HEIGHT = 190;
let data = JSON.parse(get("data").textContent);
let plots = [];
const opened = new Set();  // titles of groups whose further curves are open

function ema(values, weight) {
  // Exponential mean that starts unbiased: the weights so far always sum to one.
  let sum = 0, scale = 0;
  return values.map((v) => { if (v === null || v === undefined) return v;
    sum = weight * sum + (1 - weight) * v; scale = weight * scale + (1 - weight); return sum / scale; });
}
const faint = (colour, share) => colour + Math.round(255 * share).toString(16).padStart(2, "0");
const shown = (v) => v === null || v === undefined ? "-" : Math.abs(v) >= 1e4 || (v !== 0 && Math.abs(v) < 1e-3)
  ? v.toExponential(2) : String(Number(v.toPrecision(4)));

// The tables of one chart: for each run raw, smooth, and low and high where there are any, over common steps.
function columns(group, name, weight, bands) {
  const tables = [], series = [{ label: "step" }], pairs = [];
  group.runs.forEach((run, i) => {
    const curve = run.curves[name];
    if (!curve || curve.x.length < 1) return;
    const colour = COLOURS[i % COLOURS.length], several = group.runs.length > 1;
    const dots = { show: curve.x.length < 2 };
    const table = [curve.x, curve.y, ema(curve.y, weight)];
    series.push({ label: several ? `${run.name} (raw)` : "raw", stroke: faint(colour, 0.28), width: 1, points: dots,
      value: (_, v) => shown(v) });
    series.push({ label: several ? run.name : "smooth", stroke: colour, width: 2, points: { show: false },
      value: (_, v) => shown(v) });
    if (bands && curve.low) {
      const at = series.length;
      table.push(curve.low, curve.high);
      for (const end of ["low", "high"]) series.push({ label: several ? `${run.name} ${end}` : end,
        stroke: faint(colour, 0.15), width: 1, points: { show: false }, value: (_, v) => shown(v) });
      pairs.push({ series: [at + 1, at], fill: faint(colour, 0.1) });
    }
    tables.push(table);
  });
  return { table: tables.length ? uPlot.join(tables) : null, series, bands: pairs };
}

// uPlot's own range; a constant curve lies in the middle of a small one.
function flatRange(_, low, high) {
  if (low === null || low === undefined) return [0, 1];
  if (low !== high) return uPlot.rangeNum(low, high, 0.1, true);
  const pad = Math.abs(low) * 0.1 || 0.1;
  return [low - pad, high + pad];
}

function chart(group, name, weight, bands, place) {
  const found = columns(group, name, weight, bands);
  if (!found.table) return;
  const figure = make("figure"), caption = make("figcaption", name);
  const last = group.runs.map((run) => run.curves[name]).filter(Boolean).map((c) => shown(c.y[c.y.length - 1]));
  caption.append(make("b", last.join(" · ")));
  figure.append(caption); place.append(figure);
  const axis = { stroke: "#667484", grid: { stroke: "#e4e8ed" }, ticks: { stroke: "#e4e8ed" }, font: "11px system-ui" };
  const plot = new uPlot({
    width: Math.max(figure.clientWidth - 24, 200), height: HEIGHT, series: found.series, bands: found.bands,
    scales: { x: { time: false }, y: { range: flatRange } }, cursor: { sync: { key: group.title }, drag: { x: true, y: false } },
    axes: [{ ...axis, size: 28 }, { ...axis, size: 62, values: (_, ticks) => ticks.map(shown) }],
    legend: { live: true },
  }, found.table, figure);
  plots.push({ plot, figure });
}

function draw() {
  const weight = Number(get("smoothing").value), bands = get("bands").checked, charts = get("charts");
  plots.forEach((p) => p.plot.destroy());
  plots = []; charts.replaceChildren();
  get("curves").hidden = !data.groups.length;
  for (const group of data.groups) {
    charts.append(make("h2", group.title));
    const first = make("div", undefined, "charts"); charts.append(first);
    for (const name of group.first) chart(group, name, weight, bands, first);
    if (!group.rest.length) continue;
    const more = make("details"), rest = make("div", undefined, "charts");
    more.open = opened.has(group.title);
    more.append(make("summary", `${group.rest.length} more curve${group.rest.length > 1 ? "s" : ""}`), rest);
    charts.append(more);
    const fill = () => { if (more.open && !rest.childElementCount) for (const name of group.rest) chart(group, name, weight, bands, rest); };
    more.addEventListener("toggle", () => { more.open ? opened.add(group.title) : opened.delete(group.title); fill(); });
    fill();
  }
}

function filterSamples() {
  const chosen = document.querySelector("#samples input[name=which]:checked");
  const which = chosen ? chosen.value : "all";
  for (const card of document.querySelectorAll("#samples article")) card.hidden = which !== "all" && !card.classList.contains(which);
}

async function news() {
  // The parts are made by the same templates as the page: texts of models are escaped in them.
  let state = "";
  try {
    const answer = await fetch("news" + (news.version ? `?have=${news.version}` : ""), { cache: "no-store" });
    if (answer.status === 200) {
      const found = await answer.json();
      news.version = found.version; data = found.data;
      get("status").innerHTML = found.status;
      get("results").innerHTML = found.results;
      const which = document.querySelector("#samples input[name=which]:checked")?.value;
      get("samples").innerHTML = found.samples;
      const again = which && document.querySelector(`#samples input[value=${which}]`);
      if (again) again.checked = true;
      filterSamples(); draw();
    }
    document.body.classList.remove("gone");
  } catch (error) { document.body.classList.add("gone"); state = "gone"; }
  document.body.dataset.news = state || String(Number(document.body.dataset.news || 0) + 1);
  setTimeout(news, 2000);
}

get("smoothing").oninput = draw;
get("bands").onchange = draw;
get("samples").addEventListener("change", filterSamples);
window.addEventListener("resize", () => plots.forEach((p) => p.plot.setSize({ width: Math.max(p.figure.clientWidth - 24, 200), height: HEIGHT })));
draw();
if (document.body.dataset.live === "yes") setTimeout(news, 2000);
