// Shows /api/run and /api/leaderboard. All texts of others enter the page as text, never as HTML.

const AGAIN_MS = 10_000;
const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 190;
const EDGE = { left: 52, right: 10, top: 10, bottom: 24 };
let run = null;
let readAt = 0;

const byId = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const UNITS = ["", "k", "M", "G", "T", "P", "E"];

function count(value) {
  return value === null || value === undefined ? "–" : whole.format(value);
}

function compact(value, unit = "") {
  if (value === null || value === undefined) return "–";
  let step = 0;
  while (Math.abs(value) >= 1000 && step < UNITS.length - 1) [value, step] = [value / 1000, step + 1];
  return `${short.format(value)} ${UNITS[step]}${unit}`.trim();
}

function pflop(value) {
  if (value === null || value === undefined) return "–";
  return value >= 1000 ? whole.format(value) : short.format(value);
}

function loss(value) {
  return value === null || value === undefined ? "–" : value.toFixed(3);
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172_800 ? `${short.format(seconds / 3600)} h` : `${Math.round(seconds / 86_400)} days`;
}

function date(seconds) {
  return new Date(seconds * 1000).toLocaleString("en", { dateStyle: "medium", timeStyle: "short", hour12: false });
}

function day(seconds) {
  return new Date(seconds * 1000).toLocaleDateString("en", { dateStyle: "medium" });
}

function moment(seconds) {
  const form = { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hour12: false };
  return new Date(seconds * 1000).toLocaleString("en", form);
}

function clock(seconds, span) {
  const form = span > 172_800 ? { month: "short", day: "numeric" } : { hour: "2-digit", minute: "2-digit" };
  return new Date(seconds * 1000).toLocaleString("en", { ...form, hour12: false });
}

function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function drawn(name, attributes, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

function showNumbers(facts) {
  const share = facts.share_of_work_in_aggregates;
  const nodes = facts.participants_now;
  const numbers = [
    ["Outer steps", count(facts.outer_step), "certified by every stage"],
    ["Held-out loss", loss(facts.held_out_loss), "nats per token, reported"],
    ["Training loss", loss(facts.global_loss), "nats per token, reported"],
    ["Speed", compact(facts.tokens_per_second), `tokens/s, ${compact(facts.flops_per_second, "FLOP/s")}`],
    ["Certified work", pflop(facts.pflop_total), `PFLOP in ${count(facts.successful_syncs)} aggregates`],
    ["Nodes now", count(nodes), `${count(facts.training_nodes)} train, ${count(facts.trainers)} without layers`],
    ["Wallets with work", count(facts.participants_ever), `${count(facts.above_one_exaflop)} above 1 EFLOP`],
    ["Work in certificates", share === null || share === undefined ? "–" : `${Math.round(100 * share)} %`,
      "of the tokens that nodes report"],
  ];
  byId("numbers").replaceChildren(...numbers.map(([name, value, note]) => {
    const group = element("div");
    const shown = element("dd", value);
    shown.append(element("small", note));
    group.append(element("dt", name), shown);
    return group;
  }));
}

function ticks(low, high, least) {
  const size = 10 ** Math.floor(Math.log10((high - low) / 5));
  const step = Math.max(least, [1, 2, 5, 10].map((each) => each * size).find((each) => (high - low) / each <= 5));
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return found;
}

// `series` are {name, points: [[seconds, value or null]], format}. Null breaks a line.
function chart(figure, series, { fromZero = false, leastStep = 0, format = short.format } = {}) {
  const known = series.map((one) => ({ ...one, points: one.points.filter(([, value]) => value !== null) }));
  const all = known.flatMap((one) => one.points);
  if (new Set(all.map(([at]) => at)).size < 2) {
    figure.replaceChildren(element("p", "There is no curve yet: it begins with the second measurement."));
    return;
  }
  const [times, values] = [all.map(([at]) => at), all.map(([, value]) => value)];
  const [first, last] = [Math.min(...times), Math.max(...times)];
  let [low, high] = [fromZero ? 0 : Math.min(...values), Math.max(...values)];
  if (high - low < 1e-9) [low, high] = [fromZero ? 0 : low - 0.5, high + 0.5];
  if (!fromZero) low -= (high - low) / 20;
  const width = Math.max(240, figure.clientWidth);
  const x = (at) => EDGE.left + ((at - first) / (last - first || 1)) * (width - EDGE.left - EDGE.right);
  const y = (value) => HEIGHT - EDGE.bottom - ((value - low) / (high - low)) * (HEIGHT - EDGE.top - EDGE.bottom);
  const words = known.filter((one) => one.points.length).map((one) =>
    `${one.name}: from ${format(one.points[0][1])} to ${format(one.points.at(-1)[1])}`);
  const label = `${words.join("; ")}, between ${date(first)} and ${date(last)}`;
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", "aria-label": label });
  for (const tick of ticks(low, high, leastStep)) {
    const at = y(tick).toFixed(1);
    svg.append(drawn("line", { x1: EDGE.left, x2: width - EDGE.right, y1: at, y2: at, class: "grid" }));
    svg.append(drawn("text", { x: EDGE.left - 6, y: Number(at) + 4, "text-anchor": "end", class: "axis" }, format(tick)));
  }
  for (const [at, anchor] of [[first, "start"], [last, "end"]]) {
    const text = clock(at, last - first);
    svg.append(drawn("text", { x: x(at), y: HEIGHT - 6, "text-anchor": anchor, class: "axis" }, text));
  }
  series.forEach((one, index) => {
    const style = index ? "second" : "first";
    let path = "";
    for (const [at, value] of one.points) {
      if (value === null) path += " ";
      else path += `${path === "" || path.endsWith(" ") ? "M" : "L"}${x(at).toFixed(1)},${y(value).toFixed(1)}`;
    }
    svg.append(drawn("path", { d: path, class: style }));
    const end = known[index].points.at(-1);
    if (end) svg.append(drawn("circle", { cx: x(end[0]), cy: y(end[1]), r: 3.5, class: `dot ${style}` }));
  });
  figure.replaceChildren(svg, ...(series.length > 1 ? [legend(series)] : []));
}

function legend(series) {
  const shown = element("figcaption", "", "legend");
  series.forEach((one, index) => {
    const item = element("span");
    const line = drawn("svg", { viewBox: "0 0 26 8", height: 8, "aria-hidden": "true" });
    line.append(drawn("line", { x1: 0, x2: 26, y1: 4, y2: 4, class: index ? "second" : "first" }));
    item.append(line, one.name);
    shown.append(item);
  });
  return shown;
}

function showCharts(facts) {
  const history = facts.history ?? [];
  const points = (name) => history.map((sample) => [sample.at, sample[name]]);
  const heldOut = (facts.held_out ?? []).map((point) => [point.time, point.loss]);
  const losses = [{ name: "Held-out loss", points: heldOut }, { name: "Training loss", points: points("loss") }];
  chart(byId("loss"), losses, { format: (value) => value.toFixed(2) });
  chart(byId("speed"), [{ name: "Tokens per second", points: points("tokens_per_second") }],
    { fromZero: true, format: compact });
  chart(byId("nodes"), [{ name: "Nodes that train", points: points("participants") }],
    { fromZero: true, leastStep: 1 });
}

// `columns` are [heading, value of a row, whether it is text]; the first one names the row.
function table(shown, columns, rows, empty) {
  const head = element("tr");
  for (const [name, , isText] of columns) {
    const cell = element("th", name, isText ? "text" : "");
    cell.scope = "col";
    head.append(cell);
  }
  const body = rows.map((row, index) => {
    const line = element("tr");
    columns.forEach(([, value, isText], place) => {
      const cell = element(place ? "td" : "th", value(row, index), isText ? "text" : "");
      if (!place) cell.scope = "row";
      line.append(cell);
    });
    return line;
  });
  if (!rows.length) {
    const cell = element("td", empty);
    cell.colSpan = columns.length;
    body.push(element("tr"));
    body[0].append(cell);
  }
  const [thead, tbody] = [element("thead"), element("tbody")];
  thead.append(head);
  tbody.append(...body);
  shown.replaceChildren(thead, tbody);
}

function showStages(facts) {
  const joins = facts.join_seconds;
  const words = joins?.nodes
    ? `Half of the ${count(joins.nodes)} nodes that started within a day trained after ${duration(joins.median)}.` : "";
  const waiting = facts.queue === 1 ? "1 node waits." : `${count(facts.queue)} nodes wait.`;
  const checked = (facts.reachable_nodes ?? 0) + (facts.unreachable_nodes ?? 0);
  const outside = checked ? `${count(facts.reachable_nodes)} of ${count(checked)} nodes can be reached from outside.` : "";
  const list = facts.has_list ? "Only listed and invited wallets may join." : "";
  const said = [words, facts.queue ? waiting : "No node waits.", outside, list];
  byId("joining").textContent = said.filter(Boolean).join(" ");
  table(byId("stages"), [
    ["Stage", (stage) => stage.stage, true],
    ["Layers", (stage) => (stage.layers ? `${stage.layers[0] + 1} to ${stage.layers[1]}` : "none")],
    ["Working", (stage) => count(stage.layers ? stage.replicas : facts.trainers)],
    ["Preparing", (stage) => count(stage.preparing)],
    ["Wanted", (stage) => count(stage.wanted)],
    ["Free places", (stage) => count(stage.free)],
    ["Tokens/s", (stage) => compact(stage.tokens_per_second)],
  ], facts.stages, "");
}

function showRounds(facts) {
  const missing = (facts.certificates ?? []).reduce((sum, stage) => sum + stage.missing, 0);
  byId("kept").textContent = "Each round ends with a certificate that a quorum of the voting members signs."
    + (missing ? ` ${count(missing)} earlier certificates are not known here, so their work is not counted.` : "");
  const kinds = { aggregate: "together", alone: "one member alone", entries: "members only" };
  table(byId("rounds"), [
    ["Time", (round) => moment(round.time), true],
    ["Stage", (round) => facts.stages[round.stage]?.stage ?? count(round.stage + 1), true],
    ["Outer step", (round) => count(round.outer_step)],
    ["Kind", (round) => kinds[round.kind] ?? round.kind, true],
    ["Accepted", (round) => (round.kind === "aggregate" ? `${round.accepted} of ${round.members}` : "–")],
    ["Tokens", (round) => (round.kind === "aggregate" ? compact(round.tokens) : "–")],
    ["Duration", (round) => (round.kind === "aggregate" ? duration(round.seconds) : "–")],
  ], (facts.rounds ?? []).slice(0, 20), "No certificate is known yet.");
}

function showBoard(board) {
  table(byId("board"), [
    ["Rank", (_, index) => count(index + 1)],
    ["Member", (wallet) => wallet.name ?? wallet.wallet.slice(0, 8), true],
    ["PFLOP", (wallet) => pflop(wallet.pflop)],
    ["Tokens", (wallet) => compact(wallet.tokens)],
    ["Rounds", (wallet) => count(wallet.rounds)],
    ["Hours", (wallet) => short.format(wallet.hours)],
    ["Since", (wallet) => day(wallet.since)],
  ], board.wallets.slice(0, 100), "No certificate names the work of a member yet.");
}

function notice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

function showAge() {
  if (!run) return;
  const age = (Date.now() - readAt) / 1000;
  byId("fresh").textContent = `The organiser answered ${duration(age)} ago`
    + (run.started_at ? `. The run's record begins ${date(run.started_at)}.` : ".");
  if (age > 60) {
    notice(`The organiser does not answer. The run continues without it. These facts are from ${date(readAt / 1000)}.`);
  }
}

function show(facts, board) {
  [run, readAt] = [facts, Date.now()];
  document.title = `${facts.name} · NeuroShard run`;
  byId("name").textContent = facts.name;
  byId("id").textContent = facts.run_id;
  notice([facts.trouble, facts.is_monitored ? facts.monitor : "This organiser does not observe the run."]
    .filter(Boolean).join(" "));
  showNumbers(facts);
  showCharts(facts);
  showStages(facts);
  showRounds(facts);
  showBoard(board);
  showAge();
}

async function read(path) {
  const answer = await fetch(path, { cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(20_000) });
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return answer.json();
}

async function refresh() {
  try {
    show(...await Promise.all([read("api/run"), read("api/leaderboard")]));
  } catch {
    if (!run) notice("The organiser does not answer. The run continues without it.");
    showAge();
  }
}

refresh();
setInterval(() => document.hidden || refresh(), AGAIN_MS);
setInterval(showAge, 5000);
addEventListener("resize", () => run && showCharts(run));
document.addEventListener("visibilitychange", () => document.hidden || refresh());
