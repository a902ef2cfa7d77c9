// Shows one problem at a time; arrow keys, a filter and a search. All text is set as text.
const data = JSON.parse(document.getElementById("data").textContent);
const get = (id) => document.getElementById(id);
const right = (c) => c.correct === true && c.finish !== "length";
const share = (side) => { const judged = side.filter((c) => c.correct !== null && c.correct !== undefined);
  return judged.length ? judged.filter(right).length / judged.length : null; };
const tests = {
  all: () => true,
  mixed: (p) => p.sides.some((s) => s.some(right) && !s.every(right)),
  wrong: (p) => !p.sides.some((s) => s.some(right)),
  cut: (p) => p.sides.some((s) => s.some((c) => c.finish === "length")),
  better: (p) => share(p.sides[1]) > share(p.sides[0]),
  worse: (p) => share(p.sides[1]) < share(p.sides[0]),
};
let found = [], at = 0;
// Control characters and marks that reverse or hide text are shown as \\u001b; tabs and line feeds stay.
const CONTROLS = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\xad\u180e\u200b\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb]/g;
const visible = (text) => String(text).replace(CONTROLS, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
const make = (tag, text, name) => { const e = document.createElement(tag); if (text !== undefined) e.textContent = visible(text);
  if (name) e.className = name; return e; };
function card(c) {
  const mark = c.correct === null || c.correct === undefined ? "" : right(c) ? "right" : "wrong";
  const article = make("article", undefined, mark), footer = make("footer");
  const facts = { reward: c.reward, ...(c.scores || {}), answer: c.answer, tokens: c.tokens };
  for (const [k, v] of Object.entries(facts)) if (v !== null && v !== undefined) footer.append(make("span", `${k} ${v} `));
  if (c.finish === "length") footer.append(make("span", "cut"));
  article.append(make("pre", c.completion), footer);
  return article;
}
function picture(url) {
  const shown = make("img"); shown.src = url; shown.alt = "";
  return shown;
}
function show() {
  const shown = get("shown"); shown.replaceChildren();
  get("place").textContent = found.length ? `${at + 1} of ${found.length} (${data.problems.length} in all)` : "none";
  if (!found.length) return;
  const p = found[at], columns = make("div", undefined, "samples");
  shown.append(make("h3", p.uid), ...p.pictures.filter((url) => url.startsWith("data:image/")).map(picture), make("pre", p.prompt, "prompt"), columns);
  p.sides.forEach((side, i) => {
    const column = make("div"), s = share(side);
    column.append(make("h3", `${data.runs[i]}: ${s === null ? "not judged" : `${side.filter(right).length} of ${side.length} right`}`));
    column.append(...side.map(card)); columns.append(column);
  });
}
function filter() {
  const text = get("text").value.toLowerCase(), test = tests[get("which").value];
  const has = (p) => !text || p.prompt.toLowerCase().includes(text)
    || p.sides.some((s) => s.some((c) => c.completion.toLowerCase().includes(text)));
  found = data.problems.filter((p) => test(p) && has(p)); at = 0; show();
}
const move = (by) => { at = Math.min(Math.max(at + by, 0), Math.max(found.length - 1, 0)); show(); };
get("which").onchange = filter; get("text").oninput = filter;
get("back").onclick = () => move(-1); get("on").onclick = () => move(1);
document.onkeydown = (e) => { if (e.target.id !== "text") { if (e.key === "ArrowLeft") move(-1); if (e.key === "ArrowRight") move(1); } };
filter();
