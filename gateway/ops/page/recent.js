"use strict";
// What was so in the last minute or 15, from /recent: tiles, decisions, prefixes, the log.

const KINDS = {state: "state", fleet: "fleet", events: "KV events", failure: "failure", gateway: "gateway", redis: "Redis", control: "overload", pace: "slow", limits: "limits"};
const CELLS = 5; // replicas from which holders are squares, one for each replica, instead of names

// The window that the reader chose, or as much of it as the gateway has run: seconds, figures, and those of replicas.
function chosen(recent) {
  const f = recent.figures, minute = $("window").value === "minute";
  return minute ? {seconds: f.minute_seconds, of: f.minute, replicas: f.replicas_minute} : {seconds: f.seconds, of: f.whole, replicas: f.replicas};
}
const window_of = recent => span(Math.max(1, chosen(recent).seconds));
const all_of = recent => span(Math.max(1, recent.figures.seconds));

function tile(name, kind, window, value, unit, more, first, second) {
  return make("div", {class: "tile " + kind}, make("div", {class: "name"}, make("b", {}, name), make("span", {class: "window"}, window)),
    make("div", {class: "value"}, value, unit ? make("small", {}, unit) : null),
    make("div", {class: "more"}, ...more), curve(first, second));
}
const key = (name, text) => make("span", {class: "keyed"}, make("span", {class: "key " + name, "aria-hidden": "true"}), text);

function tiles(s, recent) {
  const {curves, point_seconds: width, seconds: ran} = recent.figures, {of: w, seconds: seen} = chosen(recent);
  // As much of the curves as the gateway has run, so that a new one does not show a corner of its first 15 minutes.
  const points = Math.max(8, Math.ceil(ran / width) + 1);
  const c = Object.fromEntries(Object.entries(curves).map(([name, values]) => [name, values.slice(-points)]));
  const window = "last " + window_of(recent);
  const [ttft, ttftUnit] = seconds(w.ttft_p50), [e2e, e2eUnit] = seconds(w.e2e_p50);
  const hit = w.hit_reported ?? w.hit_predicted, reported = w.hit_reported != null;
  const rates = c.requests.map(n => n / width), rate = seen ? w.requests / seen : 0;
  // What waits now is from /status: a point of the curves is the most that waited in its 15 s.
  const waiting = s.replicas.reduce((sum, r) => sum + (r.waiting || 0), 0);
  const queued = (s.admission || []).reduce((sum, one) => sum + one.waiting, 0);
  const peak = Math.max(queued + waiting, ...c.queued.map((n, at) => n + c.waiting[at]));
  const failed = share(w.errors, w.requests);
  fill($("tiles"),
    tile("TTFT", "", window, ttft, ttftUnit, [key("", "median"), key("second", `p99 ${time(w.ttft_p99)}`)], c.ttft_p50, c.ttft_p99),
    tile("Whole answer", "", window, e2e, e2eUnit, [key("", "median"), key("second", `p99 ${time(w.e2e_p99)}`)], c.e2e_p50, c.e2e_p99),
    tile("Cache hit rate", "", window, percent(hit), "", hit == null ? ["no prompts"] :
      reported ? [key("", "as engines report"), key("second", `predicted ${percent(w.hit_predicted)}`)] : ["as predicted; no answer told its own"],
      reported ? c.hit_reported : c.hit_predicted, reported ? c.hit_predicted : null),
    tile("Requests", "", window, rate < 10 ? rate.toFixed(1) : count(rate), "a second", [`${count(w.requests)} in all, ${count(s.totals.inflight)} in flight now`], rates),
    tile("Errors", w.errors ? "bad" : "", window, count(w.errors), failed ? percent(failed) : "",
      [`${count(w.rejected)} rejected (4xx), ${count(w.aborted)} left by clients`], c.errors),
    tile("Queue", queued + waiting ? "warn" : "", window, count(queued + waiting), "waiting now",
      [make("div", {class: "line"}, w.refused ? `${count(w.refused)} refused` : `${count(queued)} here, ${count(waiting)} in engines`),
       key("", `peak ${count(peak)}`), key("second", "in flight")],
      c.queued.map((n, at) => n + c.waiting[at]), c.inflight));
}

// Decisions that are shown already stay where they are, so that a reader keeps the place and the selection.
function decisions(recent, several) {
  const list = recent.decisions, box = $("decisions");
  if (!list.length) { fill(box, make("div", {class: "empty"}, "No request was sampled yet. About one a second is explained here as it is placed.")); return; }
  let ul = box.querySelector("ul");
  if (!ul) fill(box, ul = make("ul", {class: "rows"}));
  const id = one => `${one.at}/${one.number}`;
  const known = new Map([...ul.children].map(li => [li.dataset.id, li]));
  const shown = list.map(one => known.get(id(one)) || decision(one, several));
  shown.forEach((li, at) => { li.dataset.id ||= id(list[at]); });
  const wanted = new Set(shown);
  for (const li of [...ul.children]) if (!wanted.has(li)) li.remove();
  shown.forEach((li, at) => { if (ul.children[at] !== li) ul.insertBefore(li, ul.children[at] || null); });
}
function decision(one, models) {
  const held = one.tokens ? `${count(one.held_tokens)} of ${count(one.tokens)} tokens held` : "prompt not read";
  return make("li", {},
    make("div", {class: "meta"}, make("span", {}, clock(one.at)), make("span", {}, one.path), models && one.model ? make("span", {}, one.model) : null, make("span", {}, held)),
    make("div", {}, ...sentence(one.sentence, one.replicas[0])),
    one.text ? make("div", {class: "text"}, one.text) : null);
}

function holders(node, fleet) {
  const have = new Set(node.holders), total = node.holders.length + node.more_holders;
  if (!total) return make("span", {class: "sub"}, "held by nobody now");
  if (fleet.length < CELLS) return make("span", {class: "held"}, make("span", {class: "sub"}, "held by"), ...fleet.filter(r => have.has(r.id)).map(r => make("span", {class: "tag"}, r.id)));
  return make("span", {class: "held", title: node.holders.join(", ")},
    ...fleet.slice(0, 64).map(r => make("span", {class: "cell" + (have.has(r.id) ? " on" : ""), "aria-hidden": "true"})),
    make("span", {class: "sub"}, `held by ${total} of ${fleet.length}`), make("span", {class: "unseen"}, node.holders.join(", ")));
}
function prefixes(recent, s) {
  const {samples, nodes} = recent.prefixes;
  $("prefixes-about").textContent = samples ? `of ${several(samples, "sampled prompt", "sampled prompts")}, last ${all_of(recent)}` : "";
  if (!nodes?.length) {
    fill($("prefixes"), make("div", {class: "empty"}, samples > 1 ? `None of ${samples} sampled prompts began as another one did.` : "No prefix was asked for twice yet."));
    return;
  }
  const many = s.models.length > 1, lists = new Map();
  const root = make("ul", {class: "tree"});
  const ids = new Set(nodes.map(node => node.id));
  for (const node of nodes) {
    const above = node.path.filter(id => ids.has(id)).at(-1);
    const li = make("li", {}, make("div", {class: "node"},
      make("div", {class: "head", title: `prefix ${node.id}`}, make("b", {}, percent(node.share)), make("span", {}, several(node.tokens, "token", "tokens")),
        many && !above ? make("span", {class: "tag"}, node.model) : null, holders(node, s.replicas)),
      node.text ? make("div", {class: "text"}, node.text) : null, bar(node.share)));
    let list = above ? lists.get(above)?.querySelector(":scope > ul") : root;
    if (!list && lists.has(above)) lists.get(above).append(list = make("ul"));
    (list || root).append(li);
    lists.set(node.id, li);
  }
  fill($("prefixes"), root);
}

function journal(recent) {
  if (!recent.journal.length) { fill($("log"), make("div", {class: "empty"}, "Nothing has happened yet.")); return; }
  fill($("log"), make("ul", {class: "rows log"}, ...recent.journal.map(one => make("li", {},
    make("span", {class: "sub"}, clock(one.at)),
    make("span", {class: "dot " + one.level, "aria-hidden": "true"}),
    make("span", {class: "who", title: one.replica || null}, one.replica || KINDS[one.kind] || one.kind),
    make("span", {}, one.kind === "events" ? "KV events " : "", one.text, one.times > 1 ? make("span", {class: "times"}, `× ${count(one.times)}`) : null)))));
}
