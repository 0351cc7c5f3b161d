// The page at /ui. Everything a prompt or a server says enters the document as text, never as markup.
"use strict";

const STATUS_MS = 2000, SLOW_MS = 6000, KEPT = 180, TIMEOUT_MS = 40000;
const LISTED = 20; // streams
const KEY = "raycache-key";
const LANES = {
  save: ["host", "saved_bytes", "save_s", "device to host"],
  load: ["host", "loaded_bytes", "load_s", "host to device"],
  persist: ["storage", "persisted_bytes", "persist_s", "host to storage"],
  prefetch: ["storage", "prefetched_bytes", "prefetch_s", "storage to host"],
};
const state = {
  key: sessionStorage.getItem(KEY) || "", isPaused: false, isLimited: false, replica: "",
  samples: [], // {at, status}, oldest first
  history: [], // {at, status, lost: {cause: tokens lost since the sample before}}, as the server keeps it
  streams: null, why: null, tree: null, achievable: null, hasAchievable: true,
  tier: "device", path: null, // ids from the top; null: not chosen yet
};

// --- elements --------------------------------------------------------------------------------------------------------

const $ = (id) => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "click") made.addEventListener("click", value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function table(id, caption, head, rows, texts = []) {
  const stacks = $(id).classList.contains("stack"); // cells below each other where it is narrow, which hides the roles
  const role = (name) => ({ role: stacks ? name : null });
  const cells = (tag, row) => row.map((cell, i) => el(tag, {
    class: texts.includes(i) ? "text" : null, scope: tag === "th" ? "col" : null,
    ...(tag === "th" ? role("columnheader") : { "data-label": stacks ? head[i] : null, ...role("cell") }) }, cell));
  const body = rows.map((row) => el("tr", role("row"), ...cells("td", row)));
  $(id).hidden = !rows.length;
  $(id).replaceChildren(el("caption", {}, caption), el("thead", role("rowgroup"), el("tr", role("row"), ...cells("th", head))),
    el("tbody", role("rowgroup"), ...body));
}

// --- numbers and words -----------------------------------------------------------------------------------------------

const at = (value, ...path) => path.reduce((found, name) => (found ?? {})[name], value) ?? 0;

function short(count) {
  for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(count) >= limit) return `${(count / (unit === "k" ? 1e3 : limit)).toFixed(1)}${unit}`;
  }
  return count.toFixed(Number.isInteger(count) || Math.abs(count) >= 100 ? 0 : 1);
}

function bytes(count) {
  for (const [limit, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (count >= limit) return `${(count / limit).toFixed(1)} ${unit}`;
  }
  return `${Math.round(count)} B`;
}

const percent = (part, whole, digits = 0) => (whole > 0 ? `${(100 * part / whole).toFixed(digits)} %` : "–");

function seconds(count) {
  if (count < 90) return `${Math.round(count)} s`;
  return count < 5400 ? `${Math.round(count / 60)} min` : `${(count / 3600).toFixed(1)} h`;
}

// Control characters, and those that hide text or turn its direction around, become visible.
const visible = (text) =>
  text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, "\u00b7");
const oneLine = (text) => visible(text.replace(/<\|[^|<>]{1,40}\|>/g, " ").replace(/\s+/g, " ").trim());

function nameOf(prefix) {
  if ("tenant" in prefix) return prefix.tenant === null ? "with a cache_salt" : prefix.tenant || "without a cache_salt";
  return (prefix.text && oneLine(prefix.text)) || `text not shown (${prefix.id.slice(0, 6)})`;
}

// --- what the server says --------------------------------------------------------------------------------------------

async function ask(path) {
  const headers = state.key ? { Authorization: `Bearer ${state.key}` } : {};
  const options = { headers, cache: "no-store", credentials: "omit", redirect: "error", signal: AbortSignal.timeout(TIMEOUT_MS) };
  const response = await fetch(path, options);
  const body = await response.json().catch(() => ({}));
  if (response.ok) return body;
  throw Object.assign(new Error(at(body, "error", "message") || `${path}: status ${response.status}`), { status: response.status });
}

function told(error) {
  if (error.status === 401) {
    showKeyForm(state.key ? "This key is not valid." : "This server asks for an API key.");
    say("down", "needs a key");
  } else say("down", `no response: ${error.message}`);
}

function say(kind, text) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").className = kind;
}

async function lookFast() {
  try {
    const status = await ask("status");
    state.isLimited = false;
    state.samples.push({ at: performance.now() / 1000, status });
    state.samples.splice(0, state.samples.length - KEPT);
    say("ready", status.waiting ? "ready, requests wait" : "ready");
  } catch (error) {
    state.isLimited = error.status === 403;
    if (!state.isLimited) return told(error);
    say("ready", "ready");
  }
  drawFast();
}

async function lookSlow() {
  const replica = state.replica ? `&replica=${encodeURIComponent(state.replica)}` : "";
  const asked = [ask(`cache/tree?limit=400&depth=7${replica}`), ask("cache/why"), state.hasAchievable ? ask("cache/achievable") : null, ask("history")];
  const [tree, why, achievable, history] = await Promise.allSettled(asked);
  if (tree.status === "fulfilled") state.tree = tree.value;
  else told(tree.reason);
  if (why.status === "fulfilled") noteWhy(why.value.tenants);
  if (achievable.status === "fulfilled") state.achievable = achievable.value;
  else state.hasAchievable = achievable.reason.status >= 500; // other answers stay as they are
  if (history.status === "fulfilled") noteHistory(history.value.samples);
  if (state.tree) drawTree();
  drawCauses();
  drawFast();
}

async function lookStreams() {
  try { state.streams = await ask(`streams?limit=${LISTED}`); } catch { return; } // the other questions tell why
  drawLive();
}

function noteHistory(samples) {
  const now = performance.now() / 1000;
  state.history = samples.map((status) => ({ at: now - status.age_s, status, lost: status.lost_tokens }));
}

// Samples of the server's figures: those that it keeps, and what this page has seen since.
function series() {
  const kept = state.isLimited ? [] : state.history, last = kept.at(-1)?.at ?? -Infinity;
  return [...kept, ...state.samples.filter((sample) => sample.at > last)];
}

function noteWhy(tenants) {
  const total = { prompt: 0, computed: 0, rows: [] };
  for (const [tenant, found] of Object.entries(tenants)) {
    total.prompt += found.prompt_tokens;
    total.computed += found.computed_tokens;
    for (const row of found.causes) total.rows.push({ ...row, tenant });
  }
  state.why = total;
}

// What a counter gained; after a restart of the engine, all it has.
const gain = (now, before, ...path) => {
  const value = at(now, ...path), earlier = at(before, ...path);
  return value >= earlier ? value - earlier : value;
};

function change(back = 1) {
  const now = state.samples.at(-1), before = state.samples.at(-1 - back) ?? state.samples[0];
  const span = now && now !== before ? now.at - before.at : 0;
  return { now: now?.status, rate: (...path) => (span ? gain(now.status, before.status, ...path) / span : null) };
}

// --- tiles, charts, tables of the server -----------------------------------------------------------------------------

function drawFast() {
  WIDTH = Math.max(240, $("hits").clientWidth);
  const { now, rate } = change(5);
  $("note").hidden = !state.isLimited;
  if (state.isLimited) $("note").textContent = "This key shows its own prefixes. Server-wide figures need a key with the right admin.";
  for (const id of ["moves-card", "streams-card"]) $(id).hidden = state.isLimited;
  drawTiles(now, rate);
  drawHits();
  if (!now || state.isLimited) return;
  $("model").textContent = now.model;
  $("warnings").hidden = !now.warnings.length;
  $("warnings").replaceChildren(...now.warnings.map((line) => el("li", {}, line)));
  const names = Object.keys(now.replicas ?? {});
  $("replica-choice").hidden = names.length < 2;
  if ([...$("replica").options].map((one) => one.value).join() !== names.join()) {
    $("replica").replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  }
  drawMoves(now, rate);
  drawStreams(now, rate, names);
}

function drawTiles(now, rate) {
  const tiles = [], tile = (value, text) => tiles.push(el("div", { class: "tile" }, el("b", {}, value), el("span", {}, text)));
  const both = shares(now);
  if (now && !state.isLimited) {
    const lately = rate("prompt_tokens"), whole = both ? percent(both.achieved, 1) : percent(now.cached_tokens, now.prompt_tokens);
    tile(whole, `of prompt tokens cached; lately ${lately ? percent(rate("cached_tokens"), lately) : "none asked"}`);
  } else if (both) tile(percent(both.achieved, 1), "of your prompt tokens cached");
  else if (state.why) tile(percent(state.why.prompt - state.why.computed, state.why.prompt), "of your prompt tokens cached");
  if (both) tile(percent(both.achievable, 1), `achievable without limits, ± ${percent(both.error, 1, 1)}`);
  if (now && !state.isLimited) {
    const perSecond = (name) => (rate(name) === null ? "–" : short(rate(name)));
    tile(String(now.running), `streams running, ${now.waiting} waiting`);
    tile(perSecond("output_tokens"), "output tokens/s");
    tile(perSecond("computed_tokens"), `tokens computed/s of ${perSecond("prompt_tokens")} in prompts`);
    tile(percent(now.pages_total - now.pages_free, now.pages_total), "of device pages used");
  }
  $("tiles").replaceChildren(...tiles);
}

// Achieved and achievable of the same requests. The engine's own counters have others: they are ahead by the requests of
// the last moments, count each choice of a prompt, and those of all ingress processes.
const shares = (now) => (state.isLimited ? null : now?.reuse) ?? reached();

function reached() {
  const found = state.achievable;
  if (!found) return null;
  const each = found.total ?? Object.values(found.tenants ?? {})[0];
  return each && each.prompt_tokens && typeof each.achievable === "number" ? each : null;
}

const HEIGHT = 140, LEFT = 42, FOOT = 16;
let WIDTH = 600;

// Where a time lies, from the first of some samples to the last.
function timeline(samples, left) {
  const end = samples.at(-1)?.at ?? 1, start = Math.min(samples[0]?.at ?? 0, end - 60);
  return { x: (time) => left + (WIDTH - left) * (time - start) / (end - start), span: end - start };
}

function drawHits() {
  const parts = [], samples = series();
  samples.forEach(({ at: time, status }, i) => {
    if (!i) return;
    const before = samples[i - 1].status, asked = gain(status, before, "prompt_tokens");
    if (asked) parts.push([time, Math.min(1, gain(status, before, "cached_tokens") / asked)]);
  });
  const reach = reached(), both = shares(state.samples.at(-1)?.status);
  if (!parts.length && !both) return $("hits").replaceChildren(el("p", { class: "empty" }, "No prompts in the last ten minutes."));
  const { x, span } = timeline(samples, LEFT), y = (share) => 6 + (HEIGHT - FOOT - 6) * (1 - share);
  const chart = frame("Share of prompt tokens from the cache over time", [[0, "0 %"], [0.5, "50 %"], [1, "100 %"]], y, seconds(span));
  if (parts.length) {
    const points = parts.map(([time, share]) => `${x(time).toFixed(1)},${y(share).toFixed(1)}`).join(" ");
    const [first, last] = [x(parts[0][0]), x(parts.at(-1)[0])];
    chart.append(svg("polygon", { class: "area", points: `${first},${y(0)} ${points} ${last},${y(0)}` }), svg("polyline", { class: "line", points }));
    for (const [time, share] of parts.slice(-1)) chart.append(svg("circle", { class: "c0", cx: x(time), cy: y(share), r: 3 }));
  }
  if (both) chart.append(svg("line", { class: "dashed", x1: LEFT, x2: WIDTH, y1: y(both.achievable), y2: y(both.achievable) }));
  $("hits").replaceChildren(chart, el("div", { class: "legend" }, key("c0", "reused"), ...(both ? [key("dashes", "achievable, since the start")] : [])));
  const lost = (reach?.lost ?? []).slice(0, 5).map((row) => [words(row.cause), words(row.kind), short(row.tokens), percent(row.share, 1, 1)]);
  $("gap").replaceChildren(...drawCurve(), ...(lost.length ? [el("div", { class: "scroll" }, el("table", { id: "lost" }))] : []));
  if (lost.length) table("lost", "Between reused and achievable", ["cause", "kind", "tokens", "of prompts"], lost, [1]);
}

// What caches of other sizes would have reused; the sizes of the tiers are marked.
function drawCurve() {
  const points = (state.achievable?.curve ?? []).filter((point) => point.tokens > 0), tiers = Object.entries(state.achievable?.tiers ?? {});
  if (points.length < 2) return [];
  const sizes = [...points, ...tiers.map(([, tier]) => tier)].map(({ tokens }) => Math.log(Math.max(1, tokens)));
  const [low, high] = [Math.min(...sizes), Math.max(...sizes) + 0.01], most = Math.max(...points.map(({ share }) => share), 0.01);
  const x = (tokens) => LEFT + 4 + (WIDTH - LEFT - 8) * (Math.log(Math.max(1, tokens)) - low) / (high - low), y = (share) => 6 + (HEIGHT - FOOT - 6) * (1 - share / most);
  const chart = frame("Share that caches of other sizes would have reused", [[0, "0 %"], [most, percent(most, 1)]], y, "");
  for (const [i, [name, { tokens }]] of tiers.entries()) {
    chart.append(svg("line", { class: "dashed", x1: x(tokens), x2: x(tokens), y1: 6, y2: HEIGHT - FOOT }, svg("title", {}, `${name}: ${short(tokens)} tokens`)),
      svg("text", { x: x(tokens) - 4, y: HEIGHT - FOOT - 6 - 13 * i, "text-anchor": x(tokens) > WIDTH / 3 ? "end" : "start" }, name));
  }
  const line = [...points, { tokens: Math.exp(high), share: points.at(-1).share }];
  chart.append(svg("polyline", { class: "line", points: line.map(({ tokens, share }) => `${x(tokens).toFixed(1)},${y(share).toFixed(1)}`).join(" ") }),
    svg("text", { x: LEFT, y: HEIGHT - 2 }, `${short(Math.round(Math.exp(low)))} tokens`), svg("text", { x: WIDTH, y: HEIGHT - 2, "text-anchor": "end" }, short(Math.round(Math.exp(high)))));
  return [el("p", { class: "empty" }, "Reused by a cache of another size (LRU)"), chart];
}

function frame(label, marks, y, span) {
  const chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  for (const [value, text] of marks) {
    chart.append(svg("line", { class: "grid", x1: LEFT, x2: WIDTH, y1: y(value), y2: y(value) }), svg("text", { x: 0, y: y(value) + 4 }, text));
  }
  if (span) chart.append(svg("text", { x: LEFT, y: HEIGHT - 2 }, `${span} ago`), svg("text", { x: WIDTH, y: HEIGHT - 2, "text-anchor": "end" }, "now"));
  return chart;
}

const key = (kind, text) => el("span", {}, el("i", { class: `swatch ${kind}` }), text);
const words = (name) => name.replaceAll("_", " ");

function drawCauses() {
  const totals = {}, samples = state.history;
  for (const { lost } of samples) for (const [cause, tokens] of Object.entries(lost)) totals[cause] = (totals[cause] ?? 0) + tokens;
  const causes = Object.keys(totals).sort((a, b) => totals[b] - totals[a]);
  const colour = (cause) => `c${Math.min(5, causes.indexOf(cause))}`;
  const most = Math.max(1, ...samples.map(({ lost }) => Object.values(lost).reduce((sum, each) => sum + each, 0)));
  if (!causes.length) $("causes").replaceChildren(el("p", { class: "empty" }, state.why ? "Nothing known was computed again in the last ten minutes." : "The server keeps no history of prompts."));
  else {
    const { x, span } = timeline(samples, LEFT), y = (tokens) => 6 + (HEIGHT - FOOT - 6) * (1 - tokens / most);
    const chart = frame("Tokens computed again over time, by cause", [[0, "0"], [most, short(most)]], y, seconds(span));
    samples.forEach(({ at: time, lost }, i) => {
      const from = Math.max(LEFT, x(samples[i - 1]?.at ?? time - 5)), width = Math.max(2, x(time) - from - 1);
      let below = 0;
      for (const cause of causes) {
        const tokens = lost[cause] ?? 0;
        if (tokens) chart.append(svg("rect", { class: colour(cause), x: from, y: y(below + tokens), width, height: y(below) - y(below + tokens) }, svg("title", {}, `${words(cause)}: ${short(tokens)} tokens`)));
        below += tokens;
      }
    });
    $("causes").replaceChildren(chart, el("div", { class: "legend" }, ...causes.slice(0, 6).map((cause) => key(colour(cause), words(cause)))));
  }
  const rows = (state.why?.rows ?? []).sort((a, b) => b.lost_tokens - a.lost_tokens).slice(0, 6);
  const several = new Set(rows.map((row) => row.tenant)).size > 1;
  table("why", "Since the server's start, the most expensive first", [...(several ? ["tenant"] : []), "cause", "where", "requests", "tokens"], rows.map((row) => [
    ...(several ? [row.tenant] : []), words(row.kind || row.cause), visible(row.place || "–"), short(row.requests), short(row.lost_tokens)]), [several ? 2 : 1]);
}

const meter = (part, whole) => el("meter", { min: 0, max: whole || 1, value: part, "aria-label": percent(part, whole) });

function drawMoves(now, rate) {
  const tiers = now.tiers ?? {}, hits = (tier) => percent(at(now, "cached_by_tier", tier), now.prompt_tokens);
  const used = (tier) => at(tiers, tier, "pages_total") - at(tiers, tier, "pages_free");
  const rows = [["device", meter(now.pages_total - now.pages_free, now.pages_total), `${short(now.pages_total)} pages`, hits("device"), short(now.evicted_pages)]];
  if (tiers.host) rows.push(["host", meter(used("host"), at(tiers, "host", "pages_total")), `${short(at(tiers, "host", "pages_total"))} pages`, hits("host"), short(at(tiers, "host", "evicted_pages"))]);
  if ("objects" in (tiers.storage ?? {})) {
    const stored = tiers.storage;
    rows.push(["storage", meter(at(stored, "bytes_used"), at(stored, "bytes_limit")), bytes(at(stored, "bytes_limit")), hits("storage"), short(at(stored, "evicted"))]);
  }
  const gains = state.achievable?.tiers ?? {}, head = ["tier", "used", "of", "hits", "evicted"];
  if (Object.keys(gains).length) {
    head.push("twice as large");
    for (const row of rows) row.push(row[0] in gains ? `+${percent(gains[row[0]].gain_if_doubled, 1, 1)}` : "–");
  }
  table("moves", "", head, rows);
  const lanes = Object.values(LANES).filter(([tier, , busy]) => busy in (tiers[tier] ?? {})).map(([tier, moved, busy, name]) => {
    const share = rate("tiers", tier, busy);
    return [name, share === null ? "–" : `${bytes(rate("tiers", tier, moved))}/s`, meter(Math.min(1, share ?? 0), 1), bytes(at(tiers, tier, moved))];
  });
  table("lanes", "Moves", ["", "now", "busy", "in all"], lanes);
}

// The oldest requests in progress.
function drawLive() {
  const { streams, others } = state.streams, tenants = streams.some(({ tenant }) => tenant), replicas = streams.some(({ replica }) => replica);
  const cached = (tiers) => Object.entries(tiers).map(([tier, tokens]) => `${short(tokens)} ${tier}`).join(" + ") || "–";
  const now = ({ state: name, computed_tokens: done, prompt_tokens: all, output_tokens: out }) => {
    const what = name === "running" && !out && done < all ? `prompt ${percent(done, all)}` : name ?? "not known";
    return el("span", { class: `phase ${name}` }, what);
  };
  const head = ["request", ...(tenants ? ["tenant"] : []), ...(replicas ? ["replica"] : []), "state", "age", "prompt", "cached", "output", "tokens/s"];
  table("live", others ? `The ${streams.length} oldest; ${short(others)} more are not listed.` : "", head, streams.map((one) => [
    visible(one.id), ...(tenants ? [visible(one.tenant)] : []), ...(replicas ? [one.replica] : []), now(one), seconds(one.age_s),
    short(one.prompt_tokens), cached(one.cached_by_tier), short(one.output_tokens), one.tokens_per_s ? short(one.tokens_per_s) : "–"]), [0]);
  $("live-none").hidden = streams.length > 0;
}

function drawStreams(now, rate, names) {
  const samples = series(), most = Math.max(1, ...samples.map(({ status }) => status.running + status.waiting)), { x } = timeline(samples, 0);
  const line = (of) => samples.map(({ at: time, status }) => `${x(time).toFixed(1)},${(44 - 40 * of(status) / most).toFixed(1)}`).join(" ");
  const chart = svg("svg", { viewBox: `0 0 ${WIDTH} 48`, class: "spark", role: "img", "aria-label": "Streams over time" },
    svg("polyline", { class: "dashed line", points: line((status) => status.running + status.waiting) }), svg("polyline", { class: "line", points: line((status) => status.running) }));
  const counts = `${now.running} running, ${now.waiting} waiting; lately at most ${most}. Preempted ${short(now.preemptions)}, refused ${short(now.refused)}.`;
  $("streams").replaceChildren(chart, el("p", { class: "empty" }, counts));
  const several = names.length > 1;
  table("replicas", "Replicas", ["name", "running", "waiting", "output/s", "cached", "pages used"], (several ? names : []).map((name) => {
    const own = now.replicas[name], output = rate("replicas", name, "output_tokens");
    return [name, own.running, own.waiting, output === null ? "–" : short(output), percent(own.cached_tokens, own.prompt_tokens), percent(own.pages_total - own.pages_free, own.pages_total)].map(String);
  }));
  const rows = now.ranks ?? [];
  if (rows.length <= 16) {
    table("ranks", `Ranks, epoch ${now.epoch}${now.rebuilds ? `, gangs lost ${now.rebuilds}` : ""}`, ["rank", "position", "node", "device", "pages"],
      rows.map((row) => [`${several ? `${row.replica}/` : ""}${row.rank}`, row.coords, row.node, row.device, short(row.pages)].map(String)), [1]);
    return;
  }
  const nodes = Map.groupBy ? Map.groupBy(rows, (row) => String(row.node)) : new Map([["all", rows]]);
  table("ranks", `Ranks by node, epoch ${now.epoch}`, ["node", "ranks", "pages each"], [...nodes].map(([node, own]) => [node, String(own.length), short(own[0].pages)]));
}

// --- the treemap -----------------------------------------------------------------------------------------------------

// Rectangles of the given sizes, largest first, as square as can be: [{x, y, w, h}].
function squarify(sizes, box) {
  const found = [], total = sizes.reduce((sum, size) => sum + size, 0);
  let { x, y, w, h } = box, next = 0;
  const scale = total ? w * h / total : 0;
  const worst = (row, side) => {
    const sum = row.reduce((a, b) => a + b, 0), thick = sum / side;
    return Math.max(...row.map((area) => Math.max(thick * thick / area, area / (thick * thick))));
  };
  while (next < sizes.length) {
    const side = Math.max(1, Math.min(w, h)), row = [sizes[next] * scale];
    while (next + row.length < sizes.length) {
      const more = [...row, sizes[next + row.length] * scale];
      if (worst(more, side) > worst(row, side)) break;
      row.push(more.at(-1));
    }
    const thick = row.reduce((a, b) => a + b, 0) / side;
    let along = 0;
    for (const area of row) {
      const long = area / thick;
      found.push(w < h ? { x: x + along, y, w: long, h: thick } : { x, y: y + along, w: thick, h: long });
      along += long;
    }
    if (w < h) [y, h] = [y + thick, h - thick];
    else [x, w] = [x + thick, w - thick];
    next += row.length;
  }
  return found;
}

// What a prefix consists of, by size: what continues it, its own tokens, and what the server only summed up.
function partsOf(prefix) {
  const parts = prefix.prefixes.filter((below) => below.pages).map((below) => ({ kind: "prefix", prefix: below, pages: below.pages, name: nameOf(below) }));
  const own = prefix.tokens / state.tree.page_tokens;
  if (own && parts.length + prefix.others.pages) parts.push({ kind: "own", prefix, pages: own, name: "the part that these share" });
  if (prefix.others.pages > 0) parts.push({ kind: "others", prefix, pages: prefix.others.pages, name: `${short(prefix.others.prefixes)} smaller` });
  return parts.sort((a, b) => b.pages - a.pages);
}

function opened() {
  const found = [state.tree.tiers[state.tier]];
  for (const id of state.path ?? []) {
    const next = found.at(-1).prefixes.find((below) => below.id === id);
    if (!next) break;
    found.push(next);
  }
  return found;
}

function open(path) {
  state.path = path;
  drawTree();
  ($("map").querySelector("button") ?? $("map")).focus();
}

let ages = () => 0;

function drawTree() {
  const tiers = Object.keys(state.tree.tiers);
  if (!tiers.includes(state.tier)) state.tier = tiers[0];
  if (!$("tiers").contains(document.activeElement)) {
    $("tiers").replaceChildren(...tiers.map((tier) => el("button", { type: "button", "aria-pressed": String(tier === state.tier),
      click: () => { state.tier = tier; document.activeElement?.blur(); open(null); } }, tier)));
  }
  ages = ranked(state.tree.tiers[state.tier]);
  const roots = state.tree.tiers[state.tier].prefixes.filter((root) => root.pages);
  if (state.path === null && roots.length) state.path = roots.length === 1 ? [roots[0].id] : []; // one tenant needs no choice
  const chain = opened(), here = chain.at(-1);
  if (roots.length) state.path = chain.slice(1).map((prefix) => prefix.id);
  const crumbs = chain.flatMap((prefix, i) => [i ? el("i", { "aria-hidden": "true" }, "›") : null, el("button", { type: "button", title: i ? nameOf(prefix) : null,
    "aria-current": i === chain.length - 1 ? "true" : null, click: () => open(state.path.slice(0, i)) }, i ? nameOf(prefix) : "all")]);
  $("crumbs").replaceChildren(...crumbs.filter(Boolean));
  drawMap(here);
  const parts = partsOf(here).filter((part) => part.kind === "prefix").slice(0, 8);
  table("largest", "The largest here", ["begins with", "tokens", "share", "last used"], parts.map(({ prefix, name }) => [
    el("button", { type: "button", click: () => open([...state.path, prefix.id]) }, name), short(prefix.pages * state.tree.page_tokens), percent(prefix.pages, here.pages), ago(prefix.last_used)]), [0]);
  const incomplete = here.pages && !state.tree.tiers[state.tier].is_complete;
  $("legend").replaceChildren(key("age0", "used last"), key("age2", ""), key("age4", "used first, evicted next"), key("used", "in use now"), key("own", "shared part"),
    ...(incomplete ? [el("span", {}, "too many prefixes to visit all; the newest are counted")] : []));
}

// Ranks the last uses of a tree into five shades.
function ranked(tree) {
  const steps = new Set(), waiting = [tree];
  while (waiting.length) {
    const prefix = waiting.pop();
    steps.add(prefix.last_used);
    waiting.push(...prefix.prefixes);
  }
  const sorted = [...steps].sort((a, b) => b - a);
  const of = new Map(sorted.map((step, i) => [step, Math.min(4, Math.floor(5 * i / Math.max(5, sorted.length)))]));
  return (prefix) => of.get(prefix.last_used) ?? 4;
}

function ago(step) {
  const now = state.tree.step;
  if (step >= now) return "now";
  const samples = series(), seen = samples.find(({ status }) => status.steps >= step), last = samples.at(-1);
  if (seen && seen !== samples[0]) return `${seconds(last.at - seen.at)} ago`;
  return `${short(now - step)} steps ago`;
}

function drawMap(here) {
  const focused = document.activeElement?.dataset?.part;
  const map = $("map"), parts = partsOf(here), box = { x: 0, y: 0, w: map.clientWidth, h: map.clientHeight };
  const shown = parts.length ? parts : here.pages ? [{ kind: "prefix", prefix: here, pages: here.pages, name: nameOf(here) }] : [];
  const cells = squarify(shown.map((part) => part.pages), box).map((rect, i) => cell(shown[i], rect, here));
  if (!cells.length) return map.replaceChildren(el("p", {}, "Nothing is cached in this tier."));
  map.replaceChildren(...cells.flat());
  const buttons = [...map.querySelectorAll("button")];
  const chosen = buttons.find((button) => button.dataset.part === focused) ?? buttons[0];
  chosen.tabIndex = 0;
  if (focused && chosen.dataset.part === focused) chosen.focus();
  else describe(shown[0], here);
}

function place(made, { x, y, w, h }) {
  for (const [name, value] of Object.entries({ left: x, top: y, width: w, height: h })) made.style[name] = `${Math.max(0, value)}px`;
  return made;
}

const shade = ({ kind, prefix }) => (kind === "prefix" ? `age${ages(prefix)} ${prefix.locked_pages ? "used" : ""}` : kind);

function cell(part, rect, here) {
  const { kind, prefix, pages, name } = part, tokens = `${short(pages * state.tree.page_tokens)} tokens`;
  const isOpen = kind === "prefix" && prefix !== here && partsOf(prefix).length > 0;
  const made = el("button", { type: "button", tabindex: "-1", class: `cell ${shade(part)}`, "data-part": `${kind} ${prefix.id ?? ""}`,
    "aria-label": `${name}, ${tokens}, ${percent(pages, here.pages)}${isOpen ? ", opens" : ""}`, click: () => { if (isOpen) open([...state.path, prefix.id]); } });
  if (rect.w > 44 && rect.h > 18) made.append(el("b", {}, name));
  if (rect.w > 60 && rect.h > 36) made.append(el("small", {}, `${tokens} · ${percent(pages, here.pages)}`));
  for (const event of ["focus", "mouseenter"]) made.addEventListener(event, () => describe(part, here));
  return [place(made, rect), ...(isOpen ? nested(prefix, rect, 38, 3) : [])];
}

// What is inside a cell, as far as there is space for it below its label; only to look at.
function nested(prefix, { x, y, w, h }, label, levels) {
  if (!levels || w < 110 || h < label + 40) return [];
  const parts = partsOf(prefix), inside = { x: x + 5, y: y + label, w: w - 9, h: h - label - 4 };
  return squarify(parts.map((part) => part.pages), inside).flatMap((rect, i) => {
    if (rect.w < 3 || rect.h < 3) return [];
    const made = el("span", { class: `cell nested ${shade(parts[i])}`, "aria-hidden": "true" });
    if (rect.w > 60 && rect.h > 18) made.append(el("b", {}, parts[i].name));
    return [place(made, rect), ...(parts[i].kind === "prefix" ? nested(parts[i].prefix, rect, 20, levels - 1) : [])];
  });
}

function describe({ kind, prefix, pages, name }, here) {
  const size = state.tree.page_tokens, unit = state.tree.tiers[state.tier].page_bytes;
  const facts = [`${short(pages * size)} tokens${unit ? ` (${bytes(pages * unit)})` : ""}`, `${percent(pages, here.pages, 1)} of what is shown`];
  if (kind === "prefix") {
    facts.push(`last used ${ago(prefix.last_used)}`, `${short(prefix.ends)} ${prefix.ends === 1 ? "prefix ends" : "prefixes end"} in it`);
    if (prefix.locked_pages) facts.push(`${percent(prefix.locked_pages, prefix.pages)} in use now`);
    if (!("tenant" in prefix)) facts.push(`begins at token ${short(prefix.start)}`);
  }
  const text = kind === "prefix" && prefix.text;
  $("detail").replaceChildren(el("strong", {}, text ? "" : name), el("p", {}, facts.join(" · ")), text ? el("pre", {}, visible(text)) : "");
}

$("map").addEventListener("keydown", (event) => {
  if (event.key === "Escape" || event.key === "Backspace") {
    if (state.path?.length) open(state.path.slice(0, -1));
    return event.preventDefault();
  }
  const directions = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  if (!(event.key in directions) || !event.target.classList.contains("cell")) return;
  event.preventDefault();
  const [dx, dy] = directions[event.key], middle = (button) => [button.offsetLeft + button.offsetWidth / 2, button.offsetTop + button.offsetHeight / 2];
  const [x, y] = middle(event.target);
  let best = null, least = Infinity;
  for (const button of $("map").querySelectorAll("button")) {
    const [a, b] = middle(button), ahead = (a - x) * dx + (b - y) * dy, aside = Math.abs((a - x) * dy) + Math.abs((b - y) * dx);
    if (button !== event.target && ahead > 1 && ahead + 2 * aside < least) [best, least] = [button, ahead + 2 * aside];
  }
  if (!best) return;
  event.target.tabIndex = -1;
  best.tabIndex = 0;
  best.focus();
});

// --- keys, pauses, the beginning -------------------------------------------------------------------------------------

function showKeyForm(note) {
  if ($("key-note").textContent !== note) $("key-note").textContent = note;
  if (!$("key-form").hidden) return;
  $("key-form").hidden = false;
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  state.key = $("key").value.trim();
  $("key").value = "";
  if ($("key-kept").checked) sessionStorage.setItem(KEY, state.key);
  else sessionStorage.removeItem(KEY);
  Object.assign(state, { samples: [], history: [], streams: null, why: null, tree: null, achievable: null, hasAchievable: true, path: null });
  $("key-form").hidden = true;
  $("map").replaceChildren();
  look(true).then(lookAround).then(lookOften);
});
$("key-cancel").addEventListener("click", () => { $("key-form").hidden = true; });
$("key-change").addEventListener("click", () => showKeyForm("The key stays in this page's memory and is sent to this server only."));
$("pause").addEventListener("click", () => {
  state.isPaused = !state.isPaused;
  $("pause").setAttribute("aria-pressed", String(state.isPaused));
  $("pause").textContent = state.isPaused ? "Go on" : "Pause";
});
$("replica").addEventListener("change", () => { state.replica = $("replica").value; state.path = null; lookSlow(); });
new ResizeObserver(() => { if (state.tree) drawMap(opened().at(-1)); }).observe($("map"));

const busy = new Set();

// One request of a kind at a time, however slow the server is.
async function once(work) {
  if (busy.has(work)) return;
  busy.add(work);
  try { await work(); } finally { busy.delete(work); }
}

async function lookOften() {
  if (!state.isPaused && !document.hidden && $("key-form").hidden) await once(lookStreams);
}

async function look(isNow) {
  if (!isNow && (state.isPaused || state.isLimited || document.hidden || !$("key-form").hidden)) return;
  await once(lookFast);
}

async function lookAround() {
  if (!state.isPaused && !document.hidden && $("key-form").hidden) await once(lookSlow);
}

look(true).then(lookAround);
lookOften();
setInterval(look, STATUS_MS);
setInterval(lookOften, STATUS_MS);
setInterval(lookAround, SLOW_MS);
