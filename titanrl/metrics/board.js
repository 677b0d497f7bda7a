// The page of `titanrl board`, and of report.html, in which the data is in the page. Texts of runs are untrusted: they become text
// nodes only, never markup.

const FROZEN = JSON.parse(document.getElementById("frozen").textContent);  // null if the data are on the server
const main = document.getElementById("main"), nav = document.getElementById("nav"), live = document.getElementById("live");
const NUM_COLORS = 8, GROUPS = 30;
const REFRESH_MS = 1500, MAX_SHARE = 0.25;  // shortest time between two updates of the page, and largest share of time for them
const SILENCE_MS = 15000;  // a stalled run writes nothing, so its page is updated without a message, too

// Elements

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [kind, listener] of Object.entries(value)) node.addEventListener(kind, listener);
    else if (name === "style") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else if (name === "value" || name === "checked" || name === "selected") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
const put = (node, ...children) => { node.replaceChildren(); return fill(node, null, children); };
const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
const s = (tag, properties, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
const color = (number) => `var(--series-${number % NUM_COLORS + 1})`;

// Numbers

function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e15) return value.toExponential(2);
  if (size >= 1e9) return (value / 1e9).toPrecision(3) + "G";
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + "M";
  if (size >= 1e4) return (value / 1e3).toPrecision(3) + "k";
  if (size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}
function fixed(value) { return Number.isInteger(value) && Math.abs(value) > 1 ? short(value) : value === null || value === undefined ? "-" : Math.abs(value) < 1e-3 && value !== 0 ? value.toExponential(1) : value.toFixed(3); }
// The start that all texts have in common, up to a word, if it is long: a list is easier to read without it
function commonStart(texts) {
  if (texts.length < 2) return 0;
  let size = texts[0].length;
  for (const text of texts) while (!text.startsWith(texts[0].slice(0, size))) size -= 1;
  const end = texts[0].slice(0, size).lastIndexOf(" ") + 1;
  return end > 20 ? end : 0;
}
function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(seconds < 1 ? 2 : 1)} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}
const ago = (time) => time ? `${duration(Math.max(0, Date.now() / 1000 - time))} ago` : "-";
const clock = (time) => time ? new Date(time * 1000).toLocaleString([], { dateStyle: "short", timeStyle: "medium" }) : "-";

// The server, or the data in the page

const params = (values) => {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(values ?? {})) for (const item of [value].flat()) if (item !== "" && item !== null && item !== undefined) found.append(name, item);
  return found;
};

class Refused extends Error {}

async function get(path, values = {}) {
  const given = Object.fromEntries(Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined));
  if (FROZEN) return frozen(path, given);
  const response = await fetch(`/api/${path}`, { method: "POST", headers: { authorization: `Bearer ${key}`, "content-type": "application/json" }, body: JSON.stringify(given) });
  if (!response.ok) throw new Refused((await response.json()).error ?? response.statusText);
  return response.json();
}

function frozen(path, values) {
  const data = FROZEN.runs?.[values.run];
  if (path === "search") return frozenSearch(data, values);
  if (path === "group") return data[values.kind ?? "rollouts"].groups.find((group) => group.index === Number(values.index) && group.version === Number(values.version) && (!values.set || group.set === values.set));
  if (path === "evaluations") return data.evaluations.tables[values.set ?? ""] ?? Object.values(data.evaluations.tables)[0] ?? { sets: [], prompts: [], versions: [] };
  if (path === "answers") {
    const groups = data.evaluations.groups.filter((group) => group.set === values.set && group.index === Number(values.index));
    return { index: values.index, prompt: groups[0]?.rendered ?? "", answer: groups[0]?.answer ?? null, versions: groups };
  }
  if (path === "charts") {
    const curves = Object.fromEntries([values.name].flat().filter((name) => data.charts.curves[name]).map((name) => [name, data.charts.curves[name]]));
    return { axes: data.charts.axes, curves };
  }
  return data?.[path] ?? FROZEN[path];
}

function frozenSearch(data, values) {
  const { groups, ...others } = data[values.kind ?? "rollouts"];
  const text = (values.text ?? "").toLowerCase();
  const within = (value, name) => (values[`${name}_from`] === undefined && values[`${name}_to`] === undefined)
    || (value !== null && value !== undefined && value >= Number(values[`${name}_from`] ?? -Infinity) && value <= Number(values[`${name}_to`] ?? Infinity));
  const found = [];
  let completions = 0;
  for (const group of groups) {
    if (["status", "environment", "set", "task"].some((name) => values[name] && group[name] !== values[name])) continue;
    if (!within(group.version, "version") || !within(group.step, "step") || !within(group.index, "index")) continue;
    const numbers = group.completions.flatMap((each, number) => (!values.outcome || each.outcome === values.outcome) && within(each.reward, "reward")
      && (!values.part || within(each.parts[values.part], "part"))
      && (!text || [group.prompt, each.text, each.error].some((item) => item.toLowerCase().includes(text))) ? [number] : []);
    if (!numbers.length) continue;
    completions += numbers.length;
    found.push({ ...group, found: numbers, snippet: "" });
  }
  if ((values.order ?? "newest") === "newest") found.reverse();
  const at = Number(values.at ?? 0);
  return { ...others, completions, count: found.length, at, groups: found.slice(at, at + GROUPS) };
}

// The key arrives in the fragment, which a browser never sends, and stays in this origin's storage: cookies would also go to other ports
let key = null;
if (!FROZEN) {
  const given = /^#key=([\w-]+)$/.exec(location.hash);
  if (given) { localStorage.setItem("board", given[1]); history.replaceState(null, "", "/"); }
  key = localStorage.getItem("board");
}

async function follow() {
  for (;;) {
    try {
      const response = await fetch("/api/changes", { headers: { authorization: `Bearer ${key}` } });
      if (!response.ok) throw new Error(response.statusText);
      live.className = "on";
      live.textContent = "connected";
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let text = ""; ;) {
        const { value, done } = await reader.read();
        if (done) break;
        const events = (text + value).split("\n\n");
        text = events.pop();
        for (const event of events) if (event.startsWith("data: ")) changed(JSON.parse(event.slice(6)).runs);
      }
    } catch { /* the board has ended, or the connection broke */ }
    live.className = "";
    live.textContent = "not connected";
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

// Pages. Each is a function that fills `main` and returns { runs, update }: what to do when files of its runs have changed

let page = { runs: [], update: null }, place = "", updating = null, isStale = false, nextUpdate = 0, timer = 0;

function changed(names) {
  if (!page.update || !(page.runs === null || names.some((name) => page.runs.includes(name)))) return;
  isStale = true;
  clearTimeout(timer);
  timer = setTimeout(update, Math.max(0, nextUpdate - Date.now()));
}

async function update() {
  if (!isStale || updating || !page.update || document.hidden) return;
  isStale = false;
  const started = Date.now();
  nextUpdate = started + REFRESH_MS;
  updating = page.update().catch(() => { isStale = true; }).finally(() => { updating = null; nextUpdate = Math.max(nextUpdate, Date.now() + (Date.now() - started) / MAX_SHARE); if (isStale) changed(page.runs ?? [""]); });
}
document.addEventListener("visibilitychange", update);
if (!FROZEN) setInterval(() => { if (page.isRunning?.()) changed(page.runs); }, SILENCE_MS);

const where = () => {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), query: Object.fromEntries(new URLSearchParams(query)), all: new URLSearchParams(query) };
};
const link = (parts, query) => { const text = params(query).toString(); return `#/${parts.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`; };

async function show() {
  const { parts, query, all } = where(), mine = (place = location.hash);
  page = { runs: [], update: null };
  const [kind, name, tab = "overview"] = parts;
  put(nav, FROZEN ? h("b", { class: "brand" }, "TitanRL") : h("a", { class: "brand", href: "#/" }, "TitanRL board"), ...(kind === "run" ? [h("span", { class: "sep" }, "/"), h("a", { href: link(["run", name]) }, name)] : kind === "compare" ? [h("span", { class: "sep" }, "/"), h("b", {}, "comparison")] : []));
  document.title = `${name ?? (kind === "compare" ? "Comparison" : "Runs")} - TitanRL`;
  try {
    const next = kind === "run" ? await runPage(name, tab, query) : kind === "compare" ? await comparePage(all.getAll("run")) : await listPage();
    if (place === mine) { page = next; window.scrollTo(0, Number(history.state?.y ?? 0)); }
  } catch (error) {
    if (!(error instanceof Refused)) console.error(error);
    put(main, h("div", { class: "cause" }, h("b", {}, "This page cannot be shown"), h("pre", {}, error.message), error.message.includes("key") ? h("p", {}, "Open the address that titanrl board printed; it contains the key.") : null));
  }
  document.documentElement.dataset.ready = location.hash || "#/";
}

// Runs

const chip = (state) => h("span", { class: `chip ${state}` }, state);

function spark(values) {
  if (values.length < 2) return null;
  const low = Math.min(...values), span = Math.max(...values) - low || 1;
  const path = values.map((value, at) => `${at ? "L" : "M"}${(at / (values.length - 1) * 100).toFixed(1)} ${(26 - (value - low) / span * 24).toFixed(1)}`).join("");
  return s("svg", { class: "spark", viewBox: "0 0 100 28", preserveAspectRatio: "none", "aria-hidden": "true" }, s("path", { d: path }));
}

async function listPage() {
  const chosen = new Set();
  const body = h("tbody"), filter = h("input", { type: "search", placeholder: "Filter by name", "aria-label": "Filter runs by name" });
  const compare = h("button", { class: "primary", disabled: true, on: { click: () => { location.hash = link(["compare"], { run: [...chosen] }); } } }, "Overlay the chosen runs");
  const head = h("p", { class: "muted small" });
  let runs = [];
  const draw = () => {
    const text = filter.value.toLowerCase(), focused = document.activeElement?.dataset?.focus;
    put(body, ...runs.filter((run) => run.name.toLowerCase().includes(text)).map((run) => h("tr", {},
      h("td", { class: "pick" }, h("input", { type: "checkbox", "data-focus": `pick ${run.name}`, "aria-label": `Choose ${run.name}`, checked: chosen.has(run.name), on: { change: (event) => {
        if (event.target.checked) chosen.add(run.name); else chosen.delete(run.name);
        compare.disabled = chosen.size < 2;
      } } })),
      h("td", {}, h("a", { class: "name", "data-focus": run.name, href: link(["run", run.name]) }, run.name), run.cause && run.state !== "running" ? h("div", { class: "why", title: run.cause }, run.cause) : null),
      h("td", {}, chip(run.state)),
      h("td", {}, `${run.step}${run.num_steps ? ` of ${run.num_steps} steps` : " steps"}`, run.num_steps ? h("div", { class: "progress" }, h("i", { style: { width: `${Math.min(100, 100 * run.step / run.num_steps)}%` } })) : null),
      h("td", {}, run.score === null ? "-" : [h("b", {}, fixed(run.score)), " ", h("span", { class: "muted small" }, run.score_of)]),
      h("td", {}, spark(run.spark)),
      h("td", { class: "muted", title: clock(run.updated) }, ago(run.updated)))));
    head.textContent = runs.length ? `${runs.length} ${runs.length === 1 ? "run" : "runs"}, the newest first` : "There is no run in this folder yet. It appears here as soon as it starts.";
    if (focused) [...body.querySelectorAll("[data-focus]")].find((node) => node.dataset.focus === focused)?.focus();
  };
  const update = async () => {
    const found = await get("runs");
    runs = found.runs.sort((a, b) => b.updated - a.updated);
    folder.textContent = found.folder;
    draw();
  };
  const folder = h("code", { class: "muted" });
  filter.addEventListener("input", draw);
  await update();
  put(main, 
    h("div", { class: "title" }, h("h1", {}, "Runs"), folder), head,
    h("div", { class: "tools", style: { "margin-top": "14px" } }, filter, compare),
    h("div", { class: "card wide", tabindex: 0, role: "region", "aria-label": "Runs" }, h("table", { class: "runs" },
      h("thead", {}, h("tr", {}, ["", "run", "state", "progress", "score", "reward over the run", "last activity"].map((text) => h("th", { scope: "col" }, text || h("span", { class: "hidden" }, "chosen"))))), body)));
  return { runs: null, update, isRunning: () => runs.some((run) => run.state === "running") };
}

// Buttons that steer a running run; a run of an older version, or on another host, has none
function steering(run) {
  const status = h("span", { class: "muted small", role: "status" }), buttons = h("span", { class: "row" }), form = h("div");
  const act = async (action, values) => {
    try { draw(await get("steer", { run: run.name, action, values }), action); } catch (error) { status.textContent = error.message; status.className = "failed-text small"; }
  };
  const draw = (reply, action) => {
    const isPaused = reply.state === "paused" || reply.state === "pausing";
    status.className = "muted small";
    status.textContent = isPaused || action !== "status" ? reply.text : "";  // the page shows the progress already
    const focused = buttons.contains(document.activeElement);
    put(buttons, h("button", { on: { click: () => act(isPaused ? "resume" : "pause") } }, isPaused ? "Continue" : "Pause"));
    if (focused) buttons.firstChild.focus();
    const names = Object.keys(reply.keys);
    if (form.hasChildNodes() || !names.length) { form.reply = reply; return; }
    form.reply = reply;
    const value = h("input", { "aria-label": "New value", size: 12, value: JSON.stringify(reply.keys[names[0]]) });
    const name = h("select", { "aria-label": "Key to change", on: { change: () => { value.value = JSON.stringify(form.reply.keys[name.value]); } } }, names.map((each) => h("option", { value: each }, each)));
    const send = () => { let given; try { given = JSON.parse(value.value); } catch { given = value.value; } act("set", { [name.value]: given }); };
    put(form, h("form", { class: "row", on: { submit: (event) => { event.preventDefault(); send(); } } }, h("label", {}, "set", name), value, h("button", { type: "submit" }, "Set from the next step on")));
  };
  act("status");
  const stacks = h("pre", { class: "stacks", tabindex: 0, role: "region", "aria-label": "Stacks of the processes", hidden: true });
  const look = async () => {
    status.textContent = "Reading the stacks.";
    try { stacks.textContent = (await get("stacks", { run: run.name })).text; stacks.hidden = false; status.textContent = ""; } catch (error) { status.textContent = error.message; status.className = "failed-text small"; }
  };
  const shown = h("button", { title: "States and stacks of all processes on this host", on: { click: look } }, "Stacks");
  return { node: h("div", {}, h("div", { class: "tools steer" }, buttons, shown, form, status), stacks), refresh: () => act("status") };
}

const TABS = { overview: "Overview", charts: "All metrics", rollouts: "Rollouts", evaluations: "Evaluations", timeline: "Timeline", events: "Events", config: "Configuration" };

async function runPage(name, tab, query) {
  const top = h("div"), controls = h("div"), content = h("div");
  let control = null, steered = 0;
  let run = null, part = null;
  const head = async () => {
    run = await get("run", { run: name });
    const progress = `step ${run.step}${run.num_steps ? ` of ${run.num_steps}` : ""}`;
    const facts = [progress, run.step_s ? `newest step ${short(run.step_s)} s` : "", run.state === "running" || run.state === "unknown" ? `last activity ${ago(run.updated)}` : `ended ${ago(run.ended)}`];
    const since = Math.max(run.last_step_time ?? 0, run.facts.Started ?? 0), quiet = Date.now() / 1000 - since;
    const silent = run.state === "running" && since && quiet > (run.step_s ? Math.max(10, 10 * run.step_s) : 90)
      ? [{ level: "bad", title: `No step for ${duration(quiet)}`, text: `${run.step_s ? `The last step took ${short(run.step_s)} s.` : "None is complete since the start."} The timeline shows what the processes wait for.`, link: "timeline" }] : [];
    const notes = tab === "overview" ? [...silent, ...run.attention] : silent;
    put(top, 
      h("div", { class: "title" }, h("h1", {}, run.name), chip(run.state), h("span", { class: "muted" }, facts.filter(Boolean).join(" · "))),
      run.outcome ? h("p", { style: { "margin-top": "8px" } }, run.outcome) : "",
      run.cause && run.state !== "running" ? h("div", { class: `cause ${run.state}` }, h("b", {}, run.state === "failed" ? "Why it failed" : "Why it ended"), h("pre", {}, run.cause), run.code !== null ? h("p", { class: "muted small" }, `exit code ${run.code}${run.signal ? ` (${run.signal})` : ""} after ${progress}`) : null) : "",
      notes.length ? h("ul", { class: "attention", "aria-label": "What needs attention" }, notes.map((note) => h("li", { class: note.level }, h("b", {}, note.title), linkTo(note.link), h("p", {}, note.text)))) : "",
      h("nav", { class: "tabs", "aria-label": "Parts of the run" }, Object.entries(TABS).filter(([id]) => available(id)).map(([id, text]) => h("a", { href: link(["run", name, id]), "aria-current": id === tab ? "page" : null }, text))));
  };
  const linkTo = (text) => { const [id, rest] = text.split("?"); return available(id) ? h("a", { href: link(["run", name, id], Object.fromEntries(new URLSearchParams(rest))) }, `See ${TABS[id].toLowerCase()}`) : null; };
  const available = (id) => !((id === "rollouts" || id === "evaluations") && !run.has_rollouts) && (!FROZEN || id !== "timeline" || FROZEN.runs[name].timeline);
  await head();
  const steer = () => {
    if (FROZEN || run.state !== "running") { control = null; put(controls); }
    else if (!control) { control = steering(run); put(controls, control.node); }
    else if (run.steered !== steered) control.refresh();
    steered = run.steered;
  };
  const makers = { overview: overviewTab, charts: chartsTab, rollouts: rolloutsTab, evaluations: evaluationsTab, timeline: timelineTab, events: eventsTab, config: configTab };
  part = await (makers[tab] ?? overviewTab)(content, run, query);
  put(main, top, controls, content);
  steer();
  part.shown?.();
  const update = async () => {
    const kept = document.activeElement?.closest?.(".tabs a")?.getAttribute("href");
    await head();
    if (kept) top.querySelector(`.tabs a[href="${CSS.escape(kept)}"]`)?.focus();
    steer();
    await part.update?.(run);
  };
  return { runs: [name], update, isRunning: () => run.state === "running" };
}

// Charts

const settings = { x: "step", smooth: 0, log: false };
const AXES = { step: "step", time: "time since the start, s", tokens: "tokens" };
const charts = new Set();

function chartTools(onChange) {
  const set = (name, value) => { settings[name] = value; for (const chart of charts) chart.draw(); onChange?.(); };
  return [
    h("label", {}, "x axis", h("select", { on: { change: (event) => set("x", event.target.value) } }, Object.keys(AXES).map((axis) => h("option", { value: axis, selected: axis === settings.x }, axis)))),
    h("label", {}, "smoothing", h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: settings.smooth, on: { input: (event) => set("smooth", Number(event.target.value)) } })),
    h("label", {}, h("input", { type: "checkbox", checked: settings.log, on: { change: (event) => set("log", event.target.checked) } }), "log scale")];
}

function smoothed(values, share) {
  let sum = 0, weight = 0;
  return values.map((value) => { sum = share * sum + (1 - share) * value; weight = share * weight + 1 - share; return sum / weight; });
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough) * power;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(Math.abs(at) < step * 1e-6 ? 0 : at);
  return found;
}

class Chart {
  // `lines` of `set`: label, color, x (places by axis), mean, low, high (null if each value is drawn), ends, thin
  constructor(title, { unit = "", log = false, stack = false } = {}) {
    Object.assign(this, { title, unit, log, stack, lines: [], at: null });
    this.legend = h("ul", { class: "legend" });
    this.plot = s("svg", { class: "plot", tabindex: 0, role: "img", "aria-label": title });
    this.node = h("figure", { class: "card chart" }, h("h3", {}, title, h("span", {}, unit)), this.legend, this.plot);
    this.plot.addEventListener("pointermove", (event) => this.point(event.clientX - this.plot.getBoundingClientRect().left));
    this.plot.addEventListener("pointerleave", () => this.point(null));
    this.plot.addEventListener("blur", () => this.point(null));
    this.plot.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") this.point(null);
      if (!move || !this.scale) return;
      event.preventDefault();
      const line = this.lines[0].x[settings.x], last = line.length - 1;
      this.number = Math.max(0, Math.min(last, this.at === null ? (move > 0 ? 0 : last) : (this.number ?? 0) + move));
      this.point(this.scale.x(line[this.number]));
    });
    this.sizes = new ResizeObserver(() => this.draw());
    this.sizes.observe(this.plot);
    charts.add(this);
  }

  set(lines) {
    this.isLoaded = true;
    this.lines = lines.filter((line) => line.mean.length);
    put(this.legend, ...this.lines.filter((line) => !line.thin).map((line) => h("li", {}, h("i", { style: { background: line.color } }), this.lines.length > 1 ? line.label : null,
      line.ends ? h("b", { title: line.ends[2] }, line.ends[2].startsWith("the only") ? fixed(line.ends[0]) : `${fixed(line.ends[0])} → ${fixed(line.ends[1])}`) : null, this.lines.length === 1 && line.ends ? line.ends[2] : null)));
    this.plot.setAttribute("aria-label", `${this.title}: ${this.lines.map((line) => `${line.label} ${line.ends ? `${fixed(line.ends[0])} to ${fixed(line.ends[1])}` : ""}`).join(", ")}. Use the arrow keys to read values.`);
    this.draw();
  }

  draw() {
    const width = this.plot.clientWidth, height = 200;
    if (!width || !this.node.isConnected) { if (!this.node.isConnected && this.wasConnected) { charts.delete(this); this.sizes.disconnect(); } return; }
    this.wasConnected = true;
    const isLog = this.log !== settings.log, share = settings.smooth;
    const value = isLog ? (v) => (v > 0 ? Math.log10(v) : NaN) : (v) => v;
    let under = null;
    const drawn = this.lines.map((line) => {
      let mean = share ? smoothed(line.mean, share) : line.mean;
      const base = this.stack && !isLog ? under : null;
      if (this.stack && !isLog) { mean = mean.map((v, at) => v + (base?.[at] ?? 0)); under = mean; }
      return { ...line, mean, base, xs: line.x[settings.x], raw: share && !this.stack ? line.mean : null };
    });
    const all = drawn.flatMap((line) => [...line.mean, ...(this.stack ? [] : [...(line.low ?? []), ...(line.high ?? []), ...(line.raw ?? [])])]).map(value).filter(Number.isFinite);
    if (!all.length) { put(this.plot, s("text", { x: 8, y: 20 }, !this.isLoaded ? "loading" : isLog ? "no value above 0" : "no data")); this.scale = null; return; }
    let low = all.reduce((a, b) => Math.min(a, b)), high = all.reduce((a, b) => Math.max(a, b)), cut = null;
    if (!isLog) {
      if (low > 0 && low < 0.6 * high) low = 0;
      const sorted = all.length > 20 ? [...all].sort((a, b) => a - b) : [];
      const usual = sorted[Math.floor(0.97 * sorted.length)];
      if (usual > 0 && high > 6 * usual) { cut = high; high = 1.4 * usual; }
      if (this.stack) low = 0;
    }
    if (high - low < 1e-12 * Math.max(1, Math.abs(high)) || high === low) { const pad = Math.abs(high) * 0.1 || 1; low = low === 0 ? 0 : low - pad; high += pad; } else if (!cut) { const pad = 0.04 * (high - low); high += pad; low -= low === 0 ? 0 : pad; }
    const xs = drawn.flatMap((line) => [line.xs[0], line.xs[line.xs.length - 1]]);
    let left = Math.min(...xs), right = Math.max(...xs);
    if (left === right) { left -= 1; right += 1; }
    const marks = isLog ? ticks(Math.floor(low), Math.ceil(high), 4).filter((v) => Number.isInteger(v) && v >= low - 1e-9 && v <= high + 1e-9) : ticks(low, high, 5);
    const labels = (marks.length ? marks : [low, high]).map((v) => [v, isLog ? (10 ** v).toExponential(0) : short(v)]);
    const pad = { left: 10 + 6.4 * Math.max(...labels.map(([, text]) => text.length)), right: 12, top: 8, bottom: 24 };
    const x = (v) => pad.left + (v - left) / (right - left) * (width - pad.left - pad.right);
    const y = (v) => pad.top + (high - Math.max(low, Math.min(high, value(v)))) / (high - low) * (height - pad.top - pad.bottom);
    const path = (px, py) => { let text = "", pen = "M"; px.forEach((v, at) => { if (py[at] === null || !Number.isFinite(value(py[at]))) { pen = "M"; return; } text += `${pen}${x(v).toFixed(1)} ${y(py[at]).toFixed(1)}`; pen = "L"; }); return text; };
    const area = (px, upper, lower) => px.length < 2 ? "" : px.map((v, at) => `${at ? "L" : "M"}${x(v).toFixed(1)} ${y(upper[at]).toFixed(1)}`).join("") + [...px.keys()].reverse().map((at) => `L${x(px[at]).toFixed(1)} ${(isLog && !(lower[at] > 0) ? height - pad.bottom : y(lower[at])).toFixed(1)}`).join("") + "Z";
    const nodes = [];
    for (const [v, text] of labels) { const at = pad.top + (high - v) / (high - low) * (height - pad.top - pad.bottom); nodes.push(s("line", { class: "gridline", x1: pad.left, x2: width - pad.right, y1: at, y2: at }), s("text", { x: pad.left - 6, y: at + 4, "text-anchor": "end" }, text)); }
    for (const v of ticks(left, right, Math.max(2, Math.floor(width / 90)))) if (settings.x !== "step" || Number.isInteger(v)) nodes.push(s("text", { x: x(v), y: height - 7, "text-anchor": v === left ? "start" : "middle" }, settings.x === "time" && right > 600 ? duration(v) : short(v)));
    for (const line of drawn) {
      if (this.stack && !isLog) nodes.push(s("path", { d: area(line.xs, line.mean, line.base ?? line.xs.map(() => 0)), fill: line.color, "fill-opacity": 0.75 }));
      else {
        if (line.low) nodes.push(s("path", { d: area(line.xs, line.high, line.low), fill: line.color, "fill-opacity": 0.16 }));
        if (line.raw) nodes.push(s("path", { d: path(line.xs, line.raw), fill: "none", stroke: line.color, "stroke-opacity": 0.3, "stroke-width": 1 }));
        nodes.push(s("path", { d: path(line.xs, line.mean), fill: "none", stroke: line.color, "stroke-width": line.thin ? 1 : 1.8, "stroke-opacity": line.thin ? 0.4 : 1, "stroke-dasharray": line.dash ? "5 3" : null, "stroke-linejoin": "round" }));
        if (line.mean.length <= 40 && !line.thin) for (const [at, v] of line.mean.entries()) if (v !== null && Number.isFinite(value(v))) nodes.push(s("circle", { cx: x(line.xs[at]), cy: y(v), r: 2.6, fill: line.color }));
      }
    }
    if (cut) nodes.push(s("text", { x: width - pad.right, y: pad.top + 8, "text-anchor": "end" }, `▲ cut off, up to ${short(cut)}`));
    this.cross = s("line", { class: "cross", y1: pad.top, y2: height - pad.bottom, visibility: "hidden" });
    this.plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    put(this.plot, ...nodes, this.cross);
    this.scale = { x, left, right, pad, width, drawn };
    if (this.at !== null) this.point(this.at);
  }

  point(at) {
    this.at = at;
    if (at === null || !this.scale) { this.tip?.remove(); this.cross?.setAttribute("visibility", "hidden"); if (at === null) this.number = null; return; }
    const { x, left, right, pad, width, drawn } = this.scale;
    const wanted = left + (at - pad.left) / (width - pad.left - pad.right) * (right - left);
    const nearest = (xs) => { let best = 0; xs.forEach((v, number) => { if (Math.abs(v - wanted) < Math.abs(xs[best] - wanted)) best = number; }); return best; };
    const found = drawn.map((line, order) => [line, nearest(line.xs), this.lines[order]]);
    const middle = found.reduce((best, [line, number]) => Math.abs(line.xs[number] - wanted) < Math.abs(best - wanted) ? line.xs[number] : best, Infinity);
    this.cross.setAttribute("x1", x(middle));
    this.cross.setAttribute("x2", x(middle));
    this.cross.setAttribute("visibility", "visible");
    this.tip ??= h("div", { class: "tip", role: "status" });
    put(this.tip, h("b", {}, `${settings.x} ${settings.x === "time" ? duration(middle) : short(Math.round(middle))}`), ...found.slice(0, 14).map(([line, number, own]) => h("div", {}, h("i", { style: { background: line.color } }), h("span", {}, line.label), h("b", {}, `${short(own.mean[number])}${line.low ? ` (${short(own.low[number])} to ${short(own.high[number])})` : ""}`))));
    const place = x(middle);
    this.tip.style.setProperty("top", `${this.plot.offsetTop + 6}px`);
    if (place > width / 2) { this.tip.style.setProperty("right", `${width - place + 26}px`); this.tip.style.removeProperty("left"); } else { this.tip.style.setProperty("left", `${place + 26}px`); this.tip.style.removeProperty("right"); }
    this.node.append(this.tip);
  }
}

// Curves of a run by metric. Of those that are known, `known` has the state of the reply, and the server sends what has changed since
async function curvesOf(run, names, known) {
  const states = new Set(names.map((name) => known.get(name)?.state));
  const { axes, curves, state } = await get("charts", { run, name: names, since: states.size === 1 ? [...states][0] : "" });
  for (const name of names) {
    const curve = curves[name], old = known.get(name)?.curve;
    const joined = (before, after) => after && curve.at ? [...before.slice(0, curve.at), ...after] : after;
    const x = curve && Object.fromEntries(Object.entries(axes[curve.axis]).map(([axis, values]) => [axis, joined(old?.x[axis], values)]));
    known.set(name, { state, curve: curve && { ...curve, x, ...Object.fromEntries(["mean", "low", "high"].map((part) => [part, joined(old?.[part], curve[part])])) } });
  }
  return known;
}

// Charts of a page: each loads the curves of its metrics when it comes into view, and again when its run has changed
class Charts {
  constructor(runs) {
    this.runs = runs;  // name, label, color, thin, group
    this.known = runs.map(() => new Map());
    this.all = new Map();
    this.visible = new Set();
    this.waiting = false;
    this.observer = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) if (isIntersecting) this.visible.add(target); else this.visible.delete(target);
      this.load();
    }, { rootMargin: "300px" });
  }

  add(title, labels, options) {
    const chart = new Chart(title, options);
    this.all.set(chart.node, { chart, labels, isStale: true });
    this.observer.observe(chart.node);
    return chart.node;
  }

  async update() {
    for (const each of this.all.values()) each.isStale = true;
    await this.load();
  }

  async load() {
    if (this.waiting) return;
    this.waiting = true;
    await null;
    for (let due; (due = [...this.visible].map((node) => this.all.get(node)).filter((each) => each.isStale)).length;) {
      for (const each of due) each.isStale = false;
      const names = [...new Set(due.flatMap((each) => Object.keys(each.labels)))];
      const found = await Promise.all(this.runs.map((run, number) => curvesOf(run.name, names, this.known[number])));
      for (const { chart, labels } of due) {
        const lines = [];
        let order = 0;
        for (const [name, label] of Object.entries(labels)) {
          this.runs.forEach((run, number) => {
            const curve = found[number].get(name).curve;
            if (!curve) return;
            const many = this.runs.length > 1;
            lines.push({ ...curve, label: many ? (Object.keys(labels).length > 1 ? `${run.label} ${label}` : run.label) : label, color: many ? run.color : color(order), dash: many && (run.dash || order > 0), thin: run.thin, group: run.group });
          });
          order += 1;
        }
        if (lines.length) chart.unit ||= lines[0].unit;
        chart.node.querySelector("h3 span").textContent = chart.unit;
        if (chart.stack) stackTogether(lines);
        chart.set(withMeans(lines));
      }
    }
    this.waiting = false;
  }
}

// Layers of a stack have values at the same places; a phase that a step lacks took no time
function stackTogether(lines) {
  const longest = lines.reduce((best, line) => line.mean.length > best.mean.length ? line : best, lines[0]);
  for (const line of lines) {
    if (line.mean.length === longest.mean.length) continue;
    const values = new Map(line.x.step.map((step, at) => [step, line.mean[at]]));
    line.mean = longest.x.step.map((step) => values.get(step) ?? 0);
    line.x = longest.x;
  }
  const sum = (line) => line.mean.reduce((total, value) => total + value, 0);
  lines.sort((a, b) => sum(b) - sum(a));
  lines.forEach((line, number) => { line.color = color(number); line.low = line.high = null; });
}

// Runs that differ in the seed only are thin lines, with their mean where all have a value
function withMeans(lines) {
  const groups = new Map();
  for (const line of lines) if (line.thin) groups.set(line.group, [...(groups.get(line.group) ?? []), line]);
  const means = [...groups].map(([group, members]) => {
    const tables = members.map((line) => new Map(line.x.step.map((step, at) => [step, at])));
    const steps = members[0].x.step.filter((step) => tables.every((table) => table.has(step)));
    const places = steps.map((step) => tables[0].get(step));
    const x = Object.fromEntries(Object.entries(members[0].x).map(([axis, values]) => [axis, places.map((at) => values[at])]));
    const mean = steps.map((step) => members.reduce((sum, line, number) => sum + line.mean[tables[number].get(step)], 0) / members.length);
    const average = (at) => members.reduce((sum, line) => sum + line.ends[at], 0) / members.length;
    return { label: group, color: members[0].color, dash: members[0].dash, x, mean, low: null, high: null, ends: [average(0), average(1), `means of ${members.length} runs`] };
  });
  return [...lines, ...means];
}

function overviewTab(content, run) {
  const grid = new Charts([{ name: run.name }]);
  const panels = h("div", { class: "grid" }), figures = h("dl", { class: "figures" }), facts = h("dl", { class: "facts" });
  let shown = "";
  const draw = (now) => {
    put(figures, ...now.figures.map(({ label, value, note }) => h("div", { class: "card" }, h("dt", {}, label), h("dd", {}, value, h("small", {}, note)))));
    put(facts, ...Object.entries({ Directory: now.path, ...now.facts }).flatMap(([label, value]) => [h("dt", {}, label), h("dd", {}, label === "Started" ? clock(value) : String(value))]));
    const names = JSON.stringify(now.panels);
    if (names === shown) return;
    shown = names;
    grid.all.clear();
    put(panels, ...now.panels.map((panel) => grid.add(panel.title, panel.labels, panel)));
  };
  draw(run);
  put(content, figures, h("div", { class: "tools" }, chartTools()), run.panels.length ? panels : h("p", { class: "muted" }, "No step is complete yet."), h("h2", {}, "Start"), facts);
  return { update: async (now) => { draw(now); await grid.update(); } };
}

// A section for each first part of the names, such as `reward`
function metricSections(grid, metrics, query, opened) {
  const search = h("input", { type: "search", placeholder: "Search metrics, such as reward or _frac", "aria-label": "Search metrics", value: query ?? "" }), count = h("span", { class: "muted small", role: "status" });
  const sections = h("div");
  let kept = new Map();
  const draw = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean), groups = new Map();
    const found = metrics.filter(([name]) => words.every((word) => name.toLowerCase().includes(word)));
    for (const [name, unit] of found) { const first = name.split("/")[0]; groups.set(first, [...(groups.get(first) ?? []), [name, unit]]); }
    count.textContent = `${found.length} of ${metrics.length} metrics`;
    put(sections, ...[...groups].map(([first, names]) => {
      const inside = h("div", { class: "grid inside" });
      const fillIt = () => { if (!inside.hasChildNodes()) inside.append(...names.map(([name, unit]) => { if (!kept.has(name)) kept.set(name, grid.add(name, { [name]: name }, { unit })); return kept.get(name); })); };
      const section = h("details", { class: "card section", open: words.length > 0 || opened.includes(first) }, h("summary", {}, `${first} `, h("span", { class: "muted" }, names.length)), inside);
      section.addEventListener("toggle", () => { if (section.open) fillIt(); });
      if (section.open) fillIt();
      return section;
    }));
  };
  search.addEventListener("input", draw);
  draw();
  return [h("div", { class: "tools" }, search, count, chartTools()), sections];
}

function chartsTab(content, run, query) {
  const grid = new Charts([{ name: run.name }]);
  put(content, ...metricSections(grid, run.metrics, query.q, ["eval", "reward", "loss", "policy"]));
  return { update: () => grid.update() };
}

async function comparePage(names) {
  if (FROZEN) names = FROZEN.compare.run_names;
  const found = await get("compare", { run: names });
  const runs = found.variants.flatMap(({ name, runs: members }, number) => members.map((member) => ({ name: member, label: members.length > 1 ? member : name, group: name, thin: members.length > 1, color: color(number), dash: number >= NUM_COLORS })));
  const grid = new Charts(runs);
  put(main, 
    h("h1", {}, found.variants.map(({ name }) => name).join(", ")),
    found.tables.map(({ title, columns, rows }) => [h("h2", {}, title), h("div", { class: "card wide", tabindex: 0, role: "region", "aria-label": title }, h("table", {}, h("thead", {}, h("tr", {}, columns.map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, rows.map(([first, ...cells]) => h("tr", {}, h("th", { scope: "row" }, first), cells.map((cell) => h("td", {}, cell)))))))]),
    found.tables.some(({ title }) => title === "Keys that differ") ? null : h("p", { class: "muted", style: { "margin-top": "12px" } }, "No key differs but the seed."),
    h("h2", {}, "Curves"), h("div", { class: "grid", style: { "margin-bottom": "16px" } }, found.metrics.map((name) => grid.add(name, { [name]: name }))),
    metricSections(grid, found.names, "", []));
  return { runs: names, update: () => grid.update() };
}

// Rollouts

function marked(text, needle) {
  if (!needle) return [text];
  const parts = [], lowered = text.toLowerCase(), wanted = needle.toLowerCase();
  let from = 0;
  for (let at = lowered.indexOf(wanted); at >= 0; at = lowered.indexOf(wanted, from)) { parts.push(text.slice(from, at), h("mark", {}, text.slice(at, at + wanted.length))); from = at + wanted.length; }
  return [...parts, text.slice(from)];
}

function dots(rewards, low, high) {
  return h("span", { class: "dots" }, rewards.slice(0, 24).map((reward) => h("i", { class: reward === null ? "lost" : "", title: reward === null ? "no reward" : `reward ${short(reward)}`, style: reward === null ? {} : { background: `rgba(var(--accent-rgb), ${high > low ? (reward - low) / (high - low) : 1})` } })));
}

const COLORINGS = { probability: "probability", mismatch: "mismatch of trainer and generator", advantage: "advantage", version: "policy version", none: "no colors" };
let coloring = "probability";

function shade(kind, segment, at, scale) {
  const value = (name) => segment[name]?.[at];
  if (kind === "probability") { const v = value("logprobs"); return v === null ? null : `rgba(var(--rare-rgb), ${(0.75 * (1 - Math.exp(v))).toFixed(3)})`; }
  if (kind === "mismatch") { const v = value("mismatch"); return v == null ? null : `rgba(var(--bad-rgb), ${(0.7 * Math.min(1, v / scale.mismatch)).toFixed(3)})`; }
  if (kind === "advantage") { const v = value("advantages"); return v == null ? null : `rgba(var(--${v < 0 ? "bad" : "good"}-rgb), ${(0.65 * Math.min(1, Math.abs(v) / scale.advantage)).toFixed(3)})`; }
  if (kind === "version") { const v = value("versions"); return v === null ? null : `color-mix(in srgb, ${color(scale.versions.indexOf(v))} 38%, transparent)`; }
  return null;
}

function tokenLines(segment, at) {
  const lines = [["token", JSON.stringify(segment.texts[at])]];
  const add = (label, value, text) => { if (value !== null && value !== undefined) lines.push([label, text]); };
  const logprob = segment.logprobs[at];
  add("probability", logprob, logprob === null ? "" : `${(100 * Math.exp(logprob)).toPrecision(3)} % (log ${logprob.toFixed(4)})`);
  add("trainer - generator", segment.mismatch?.[at], `${short(segment.mismatch?.[at])} nats`);
  add("advantage", segment.advantages?.[at], short(segment.advantages?.[at]));
  add("version", segment.versions[at], segment.versions[at]);
  if (logprob === null) lines.push(["", "not sampled by the policy"]);
  return lines;
}

function moveToken(event) {
  const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!move) return;
  event.preventDefault();
  const tokens = [...event.currentTarget.children];
  tokens[Math.max(0, Math.min(tokens.length - 1, tokens.findIndex((each) => each.classList.contains("chosen")) + move))]?.click();
}

function groupBody(group, needle, found, run) {
  const all = group.completions.flatMap((completion) => completion.segments ?? []);
  const largest = (name, floor) => all.reduce((best, segment) => (segment[name] ?? []).reduce((high, value) => Math.max(high, Math.abs(value ?? 0)), best), floor);
  const scale = { mismatch: largest("mismatch", 1e-6), advantage: largest("advantages", 1e-6), versions: [...new Set(all.flatMap((segment) => segment.versions))].filter((version) => version !== null).sort((a, b) => a - b) };
  const legend = h("span", { class: "scale", role: "status" }), shown = h("div");
  const has = { mismatch: all.some((segment) => segment.mismatch), advantage: all.some((segment) => segment.advantages), probability: true, version: true, none: true };
  const texts = [];
  const explain = () => {
    const bar = (from, to) => h("i", { style: { background: `linear-gradient(90deg, ${from}, ${to})` } });
    put(legend, ...({
      probability: ["likely", bar("transparent", "rgba(var(--rare-rgb), 0.75)"), "unlikely"],
      mismatch: has.mismatch ? ["0", bar("transparent", "rgba(var(--bad-rgb), 0.7)"), `${short(scale.mismatch)} nats`] : ["No loss was recorded for this group."],
      advantage: has.advantage ? [`-${short(scale.advantage)}`, h("i", { style: { background: "linear-gradient(90deg, rgba(var(--bad-rgb), 0.65), transparent, rgba(var(--good-rgb), 0.65))" } }), `+${short(scale.advantage)}`] : ["No loss was recorded for this group."],
      version: scale.versions.map((version, number) => [h("i", { style: { background: `color-mix(in srgb, ${color(number)} 38%, transparent)`, width: "14px" } }), `v${version}`]).flat(),
      none: [],
    })[coloring]);
    for (const [span, segment, at] of texts) { const tint = shade(coloring, segment, at, scale); if (tint) span.style.setProperty("background", tint); else span.style.removeProperty("background"); }
  };
  const picker = h("select", { "aria-label": "Color tokens by", on: { change: (event) => { coloring = event.target.value; explain(); } } }, Object.entries(COLORINGS).map(([id, text]) => h("option", { value: id, selected: id === coloring }, text)));
  const facts = [`${group.task} #${group.index}`, group.set ? `set ${group.set}` : "", group.step ? `trained on at step ${group.step}` : "", `version ${group.version}`, group.status, group.environment ? `environment ${group.environment}` : "", group.generate_s ? `generated in ${short(group.generate_s)} s` : "", group.score_s ? `scored in ${short(group.score_s)} s` : ""];
  let asked;  // how the tokens entered the loss, requested with the first click
  const lossLines = async (segment, at) => {
    if (FROZEN || segment.mismatch?.[at] == null) return [];
    asked ??= get("explain", { run: run.name, step: group.step, index: group.index }).catch((error) => ({ error: error.message }));
    const reply = await asked;
    if (reply.error) return [["loss", reply.error]];
    const found = reply.segments.find((each) => each.segment === all.indexOf(segment) && each.update === 0);
    if (!found) return [];
    const nth = segment.mismatch.slice(0, at).filter((value) => value !== null).length;
    const value = (name) => found.columns[name][nth];
    return [["ratio", `${short(value("ratio"))}${value("clip") ? `, clipped (${value("clip")})` : ""}`], ["correction", short(value("correction"))], ["loss weight", short(value("weight"))], ["loss", short(value("loss"))], ["share of the gradient", `${(100 * value("share")).toPrecision(2)} %`]];
  };
  shown.append(...group.completions.map((completion, number) => {
    const hints = h("div", { class: "explained", role: "status", hidden: true });
    const token = (segment, at) => {
      const span = h("span", { class: segment.logprobs[at] === null ? "tok other" : "tok" }, segment.texts[at]);
      texts.push([span, segment, at]);
      span.addEventListener("pointerenter", () => { span.title = tokenLines(segment, at).map(([label, text]) => `${label} ${text}`.trim()).join("\n"); });
      span.addEventListener("click", () => {
        hints.hidden = false;
        const facts = h("dl", { class: "facts" }), show = (lines) => facts.append(...lines.flatMap(([label, text]) => [h("dt", {}, label), h("dd", {}, String(text))]));
        put(hints, facts);
        show(tokenLines(segment, at));
        lossLines(segment, at).then(show);
        shown.querySelector(".tok.chosen")?.classList.remove("chosen");
        span.classList.add("chosen");
      });
      return span;
    };
    const segments = completion.segments ?? [], hasTokens = segments.some((segment) => segment.texts.length) && !needle;
    const body = hasTokens ? segments.map((segment, place) => [place ? h("p", { class: "muted small" }, `segment ${place + 1}`) : null, h("p", { class: "text", tabindex: 0, role: "group", "aria-label": "Tokens. Use the arrow keys to read their numbers.", on: { keydown: moveToken } }, segment.texts.map((_, at) => token(segment, at)))]) : h("p", { class: "text" }, completion.text ? marked(completion.text, needle) : h("span", { class: "muted" }, "(empty)"));
    const pair = (label, value, kind) => value === null || value === undefined || value === "" ? [] : [h("dt", {}, label), h("dd", { class: kind }, String(value))];
    return h("div", { class: `completion${needle && found.includes(number) ? " found" : ""}` },
      h("div", {}, h("p", {}, h("b", { class: completion.reward === null ? "big failed-text" : "big" }, completion.reward === null ? "no reward" : short(completion.reward)), completion.advantage === null ? null : h("span", { class: "muted small" }, ` advantage ${short(completion.advantage)}`)), h("p", { class: "muted small" }, `${completion.num_tokens} tokens, ${completion.finish_reason || "no end"}`), h("dl", {}, Object.keys(completion.parts).length > 1 || completion.parts.answer === undefined ? Object.entries(completion.parts).flatMap(([name, value]) => pair(name, short(value))) : [], completion.outcome === "ok" ? [] : pair("outcome", completion.outcome, "failed-text"), Object.entries(completion.metrics ?? {}).flatMap(([name, value]) => pair(name, short(value))))),
      h("div", {}, completion.error ? h("p", { class: "text failed-text" }, completion.error) : null, body, completion.cut ? h("p", { class: "muted small" }, "The rest is left out here.") : null, hints));
  }));
  explain();
  return h("div", { class: "inside-group" },
    h("p", { class: "muted small" }, facts.filter(Boolean).join(" · ")),
    h("div", { class: "text prompt", tabindex: 0, role: "region", "aria-label": "Prompt" }, marked(group.rendered || group.prompt, needle)),
    group.answer !== null ? h("p", { class: "small" }, h("span", { class: "muted" }, "expected answer "), h("code", {}, group.answer)) : null,
    group.damage ? h("p", { class: "failed-text small" }, `The tokens cannot be shown: ${group.damage}`) : null,
    h("div", { class: "tools", style: { margin: "10px 0" } }, needle ? h("span", { class: "muted small" }, "Remove the search text to color the tokens.") : [h("label", {}, "color by", picker), legend]), shown);
}

async function rolloutsTab(content, run, query) {
  const kind = query.kind ?? "rollouts";
  const names = ["text", "reward_from", "reward_to", "part", "part_from", "part_to", "status", "outcome", "environment", "task", "version_from", "version_to", "step_from", "step_to", "order"];
  const values = Object.fromEntries(names.map((name) => [name, query[name] ?? ""]));
  const list = h("div", { class: "card" }), count = h("p", { class: "muted small", role: "status", style: { margin: "0 0 10px" } }), more = h("button", { style: { "margin-top": "12px" } }, "Show more");
  let found = null, shown = 0, waiting = 0, low = 0, high = 1;
  let cut = 0, start = "";
  const entry = (group) => {
    const body = h("div");
    const rewards = group.rewards;
    const scored = rewards.filter((reward) => reward !== null);
    low = Math.min(low, ...scored); high = Math.max(high, ...scored);
    const details = h("details", { class: "group" }, h("summary", {},
      h("span", { class: "muted" }, `v${group.version}`), h("span", { class: "muted" }, `${group.task} #${group.index}`),
      h("span", { title: group.prompt }, cut ? "\u2026 " : "", marked(group.prompt.slice(cut).replace(/\s+/g, " "), values.text), group.snippet ? h("span", { class: "snippet" }, marked(group.snippet.replace(/\s+/g, " "), values.text)) : null),
      h("span", { class: "number" }, group.mean === null ? "-" : fixed(group.mean)), dots(rewards, low, high)), body);
    details.addEventListener("toggle", async () => {
      if (!details.open || body.hasChildNodes()) return;
      const whole = await get("group", { run: run.name, kind, index: group.index, version: group.version, set: group.set });
      if (!body.hasChildNodes()) body.append(whole ? groupBody(whole, values.text, group.found, run) : h("p", { class: "pad muted" }, "The run has deleted this group to keep its size limit."));
    });
    return details;
  };
  const load = async (at = 0) => {
    const mine = ++waiting;
    const started = performance.now();
    let answer;
    try { answer = await get("search", { run: run.name, kind, at, ...values }); } catch (error) { count.textContent = error.message; return; }
    if (mine !== waiting) return;
    found = answer;
    if (!at) { shown = 0; put(list, ); }
    if (!at) cut = values.text ? 0 : commonStart(found.groups.map((group) => group.prompt));
    else if (found.groups.some((group) => group.prompt.slice(0, cut) !== start)) cut = 0;
    if (!at && found.groups.length) start = found.groups[0].prompt.slice(0, cut);
    list.append(...found.groups.map(entry));
    shown += found.groups.length;
    count.textContent = `${found.completions.toLocaleString()} completions in ${found.count.toLocaleString()} groups${FROZEN?.runs[run.name].note ? ` (${FROZEN.runs[run.name].note})` : ""}, ${Math.round(performance.now() - started)} ms`;
    if (!found.count) put(list, h("p", { class: "pad muted" }, values.text || names.some((name) => values[name] && name !== "order") ? "No completion meets all conditions." : run.step ? "No rollouts are recorded. logging.rollouts_per_step sets how many groups of a step are." : "No rollout is recorded yet."));
    more.hidden = shown >= found.count;
  };
  await load();
  let due = 0;
  const set = (name, value) => {
    values[name] = value;
    clearTimeout(due);
    due = setTimeout(() => { history.replaceState(null, "", link(["run", run.name, "rollouts"], { ...values, ...(kind === "rollouts" ? {} : { kind }) })); place = location.hash; load(); }, name === "text" ? 150 : 0);
  };
  const number = (name, label, step) => h("input", { type: "number", step: step ?? "any", placeholder: label, "aria-label": `${name.replace("_", " ")}`, value: values[name], on: { input: (event) => set(name, event.target.value) } });
  const choice = (name, options, all) => options.length > 1 || values[name] ? h("select", { "aria-label": name, on: { change: (event) => set(name, event.target.value) } }, h("option", { value: "" }, all), options.map((option) => h("option", { value: option, selected: option === values[name] }, option))) : null;
  more.addEventListener("click", () => load(shown));
  const range = (label, name) => h("span", { class: "row" }, h("label", {}, label), number(`${name}_from`, "from"), number(`${name}_to`, "to"));
  put(content, 
    h("div", { class: "tools" }, h("input", { type: "search", placeholder: "Search prompts, completions, messages and errors", "aria-label": "Search texts", value: values.text, on: { input: (event) => set("text", event.target.value) } }),
      h("select", { "aria-label": "order", on: { change: (event) => set("order", event.target.value) } }, ["newest", "oldest"].map((order) => h("option", { value: order, selected: order === values.order }, `${order} first`)))),
    h("div", { class: "tools" }, range("reward", "reward"), found?.parts.length ? h("span", { class: "row" }, choice("part", found.parts, "any part") ?? h("label", {}, found.parts[0]), number("part_from", "from"), number("part_to", "to")) : null, range("version", "version"), range("step", "step"),
      choice("status", found?.status ?? [], "any status"), choice("outcome", found?.outcome ?? [], "any outcome"), choice("environment", found?.environment ?? [], "any environment"), choice("task", found?.task ?? [], "any task")),
    count, list, more);
  if (found?.parts.length === 1) values.part ||= found.parts[0];
  return { update: async () => { if (!content.querySelector("details[open]") && shown <= GROUPS && !content.contains(document.activeElement)) await load(); } };
}

async function evaluationsTab(content, run, query) {
  let name = query.set ?? "", index = query.prompt === undefined ? null : Number(query.prompt), opened = null;
  const tint = (reward) => ({ background: `rgba(var(--good-rgb), ${(0.1 + 0.55 * Math.max(0, Math.min(1, reward))).toFixed(2)})` });
  const answers = h("div"), table = h("div");
  const pick = async (at, isChosen) => {
    index = at;
    if (isChosen) { history.replaceState(null, "", link(["run", run.name, "evaluations"], { set: name, prompt: at })); place = location.hash; }
    const found = await get("answers", { run: run.name, set: name, index: at });
    put(answers, h("h2", {}, `Answers to prompt ${at} over the versions`), h("div", { class: "text prompt" }, found.prompt), found.answer !== null ? h("p", { class: "small" }, h("span", { class: "muted" }, "expected answer "), h("code", {}, found.answer)) : null,
      h("div", { class: "answers", tabindex: 0, role: "region", "aria-label": "Answers by version", style: { "margin-top": "10px" } }, found.versions.map(({ version, completions }) => h("section", { class: "card pad" }, h("h3", {}, `version ${version}`), completions.map((completion) => [h("p", { class: "muted small", style: { "margin-top": "6px" } }, `reward ${completion.reward === null ? "none" : short(completion.reward)} · ${completion.num_tokens} tokens · ${completion.finish_reason}`), completion.error ? h("p", { class: "text failed-text" }, completion.error) : null, h("p", { class: "text" }, completion.text || h("span", { class: "muted" }, "(empty)"))])))));
  };
  const draw = async () => {
    const found = await get("evaluations", { run: run.name, set: name || undefined });
    name = found.set ?? "";
    const cut = commonStart(found.prompts.map((row) => row.prompt));
    const limit = 24, versions = found.versions, step = Math.max(1, Math.ceil(versions.length / limit));
    const columns = versions.map((_, at) => at).filter((at) => at % step === 0 || at === versions.length - 1);
    put(table, 
      found.sets.length > 1 ? h("div", { class: "tools" }, h("label", {}, "evaluation set", h("select", { on: { change: (event) => { name = event.target.value; index = null; put(answers, ); draw(); } } }, found.sets.map((set) => h("option", { value: set, selected: set === name }, set))))) : "",
      found.prompts.length ? h("div", { class: "card wide pad tall", tabindex: 0, role: "region", "aria-label": "Rewards by prompt and version" }, h("table", { class: "heat" },
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, `${found.prompts.length} prompts`), columns.map((at) => h("th", { scope: "col" }, `v${versions[at]}`)))),
        h("tbody", {}, found.prompts.map((row) => h("tr", {}, h("th", { scope: "row", class: "prompt-cell" }, h("button", { class: "plain", title: row.prompt, on: { click: () => pick(row.index, true).then(() => answers.scrollIntoView({ block: "start" })) } }, (cut ? "\u2026 " : "") + (row.prompt.slice(cut).replace(/\s+/g, " ") || `#${row.index}`))), columns.map((at) => h("td", {}, row.rewards[at] === null ? h("span", { class: "cell muted" }, "-") : h("span", { class: "cell", style: tint(row.rewards[at]) }, short(row.rewards[at])))))))))
        : h("p", { class: "muted" }, "No samples of evaluations are recorded yet. logging.evaluation_prompts sets how many are."));
    if (opened === null && found.prompts.length) { opened = true; await pick(index ?? found.prompts[0].index); }
  };
  await draw();
  let drawn = run.evaluations;
  put(content, h("p", { class: "muted small", style: { "margin-bottom": "10px" } }, "Each cell is the mean reward of the answers to one prompt at one policy version. Choose a prompt to compare its answers."), table, answers);
  return { update: async (now) => { if (now.evaluations !== drawn) { drawn = now.evaluations; await draw(); } } };
}

// Timeline, events and configuration

async function timelineTab(content, run, query) {
  let steps = Number(query.steps ?? 3);
  const plot = h("div", {}, h("p", { class: "muted" }, "Reading the spans.")), usage = h("div"), says = h("div", { class: "explained", role: "status", hidden: true });
  const draw = async () => {
    const found = await get("timeline", { run: run.name, steps, step: query.step });
    if (!found?.processes.length) { put(plot, h("p", { class: "muted" }, "No spans are recorded yet.")); return; }
    const width = Math.max(320, content.clientWidth || main.clientWidth), row = 34, name = width < 600 ? 0 : 150, span = found.end - found.start;
    const x = (time) => name + (time - found.start) / span * (width - name - 8);
    const say = (process, state) => { says.hidden = false; says.textContent = `${process}: ${state.name || "nothing recorded"} (${state.kind === "busy" ? "works" : state.kind === "wait" ? "waits" : "unknown"}), ${duration(state.seconds)} from ${(state.start - found.start).toFixed(3)} s`; };
    const nodes = [s("defs", {}, s("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, s("rect", { width: 2, height: 6, fill: "var(--line)" })))];
    for (const { step, start } of found.steps) if (start >= found.start - 1e-6) nodes.push(s("line", { class: "step", x1: x(start), x2: x(start), y1: 0, y2: 22 + row * found.processes.length }), s("text", { class: "axis", x: x(start) + 3, y: 11 }, `step ${step}`));
    found.processes.forEach((process, number) => {
      const top = 18 + number * row;
      nodes.push(name ? s("text", { x: 0, y: top + 18 }, process.name) : s("text", { class: "axis", x: 0, y: top + 9 }, process.name));
      for (const state of process.states) {
        const rect = s("rect", { class: state.kind, x: x(state.start), y: top + (name ? 4 : 12), width: Math.max(0.6, x(state.start + state.seconds) - x(state.start)), height: name ? 22 : 16 }, s("title", {}, `${process.name}: ${state.name || "nothing recorded"}, ${duration(state.seconds)}`));
        rect.addEventListener("pointerenter", () => say(process.name, state));
        nodes.push(rect);
        const room = x(state.start + state.seconds) - x(state.start);
        if (room > 12 + 6.2 * state.name.length && name) nodes.push(s("text", { class: `on-${state.kind}`, x: x(state.start) + 5, y: top + 19, "pointer-events": "none" }, state.name));
      }
    });
    const height = 40 + row * found.processes.length;
    for (const tick of ticks(0, span, Math.max(3, Math.floor(width / 140)))) nodes.push(s("text", { class: "axis", x: x(found.start + tick), y: height - 4 }, `${short(tick)} s`));
    put(plot, s("svg", { class: "gantt", viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "Work and waits of each process; the table below has the same in numbers" }, nodes));
    const leftOut = found.processes.reduce((sum, process) => sum + process.left_out, 0);
    if (leftOut) plot.append(h("p", { class: "muted small" }, `The ${leftOut.toLocaleString()} shortest periods are not drawn. The table counts them.`));
    const waits = (process) => process.waits.slice(0, 3).map(([wait, share]) => `${wait} ${Math.round(100 * share)} %`).join(", ");
    put(usage, h("h2", {}, "Who works, who waits"), h("div", { class: "card wide", tabindex: 0, role: "region", "aria-label": "Processes" }, h("table", {}, h("thead", {}, h("tr", {}, ["process", "busy", "", "waits for", "host", "pid", "since"].map((text) => h("th", { scope: "col" }, text)))),
      h("tbody", {}, found.processes.map((process) => h("tr", {}, h("th", { scope: "row" }, process.name), h("td", { class: "number nowrap" }, `${Math.round(100 * process.busy)} %`),
        h("td", {}, h("div", { class: "usage", title: `${Math.round(100 * process.busy)} % busy` }, h("i", { style: { width: `${100 * process.busy}%`, background: "var(--series-1)" } }), h("i", { style: { width: `${100 * process.waits.reduce((sum, [, share]) => sum + share, 0)}%`, background: "rgba(var(--rare-rgb), 0.5)" } }))),
        h("td", {}, waits(process) || "-"), h("td", { class: "muted" }, process.host), h("td", { class: "muted" }, process.pid), h("td", { class: "muted nowrap" }, clock(process.since))))))));
  };
  put(content, 
    h("div", { class: "tools" }, FROZEN ? null : h("label", {}, "last steps", h("select", { on: { change: (event) => { steps = Number(event.target.value); query.step = undefined; draw(); } } }, [1, 3, 10, 30].map((count) => h("option", { value: count, selected: count === steps }, count)))),
      ["busy", "wait", "unknown"].map((kind) => h("span", { class: "key" }, h("i", { style: { background: { busy: "var(--series-1)", wait: "rgba(var(--rare-rgb), 0.5)", unknown: "var(--line)" }[kind] } }), { busy: "works", wait: "idle: waits", unknown: "nothing recorded" }[kind]))),
    h("div", { class: "card pad" }, plot, says), usage);
  return { update: draw, shown: draw };
}

async function eventsTab(content, run, query) {
  const list = h("tbody"), count = h("span", { class: "muted small", role: "status" }), search = h("input", { type: "search", placeholder: "Search events", "aria-label": "Search events", value: query.q ?? "" });
  const kinds = h("select", { "aria-label": "Kind of events" });
  let found = { events: [], count: 0 };
  const faults = new Set(["fault", "stall", "host_lost", "respawn", "restart", "scorer_error", "skipped_step"]);
  const draw = () => {
    const text = search.value.toLowerCase(), kind = kinds.value;
    const shown = found.events.filter((event) => (!kind || event.kind === kind) && (!text || JSON.stringify(event).toLowerCase().includes(text))).reverse().slice(0, 300);
    count.textContent = `${shown.length} of ${found.count} events`;
    put(list, ...shown.map(({ time, kind: name, ...fields }) => h("tr", {}, h("td", { class: "muted" }, clock(time)), h("td", { class: faults.has(name) || (name === "end" && fields.code) ? "failed-text" : "" }, name), h("td", { class: "text" }, Object.entries(fields).map(([label, value]) => `${label}: ${typeof value === "string" ? value : JSON.stringify(value)}`).join("\n")))));
  };
  const load = async () => {
    found = await get("events", { run: run.name });
    const names = [...new Set(found.events.map((event) => event.kind))].sort(), kept = kinds.value;
    put(kinds, h("option", { value: "" }, "all kinds"), ...names.map((name) => h("option", { value: name, selected: name === kept }, name)));
    draw();
  };
  search.addEventListener("input", draw);
  kinds.addEventListener("change", draw);
  await load();
  put(content, h("div", { class: "tools" }, search, kinds, count), h("div", { class: "card wide", tabindex: 0, role: "region", "aria-label": "Events" }, h("table", {}, h("thead", {}, h("tr", {}, ["time", "kind", "fields"].map((text) => h("th", { scope: "col" }, text)))), list)));
  return { update: load };
}

async function configTab(content, run) {
  const found = await get("config", { run: run.name });
  put(content, 
    h("h2", { style: { "margin-top": "0" } }, "What differs from the defaults"),
    found.problem ? h("p", { class: "muted" }, found.problem) : found.changed.length ? h("div", { class: "card wide", tabindex: 0, role: "region", "aria-label": "Changed keys" }, h("table", { class: "changed" }, h("thead", {}, h("tr", {}, ["key", "value", "default"].map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, found.changed.map(([name, value, usual]) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, name)), h("td", { class: "text" }, value), h("td", { class: "text" }, usual)))))) : h("p", { class: "muted" }, "Nothing."),
    h("h2", {}, "All keys"), h("pre", { class: "card pad wide text", tabindex: 0, role: "region", "aria-label": "Configuration" }, found.text));
  return {};
}

addEventListener("hashchange", () => { if (location.hash !== place) show(); });
if (FROZEN && !location.hash.startsWith("#/")) history.replaceState(null, "", FROZEN.page);
show();
if (FROZEN) live.textContent = ""; else follow();
