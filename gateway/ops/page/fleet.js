"use strict";
// What is so now, from /status: replicas, what is amiss, admission, shadows, the map.

const DENSE = 12; // replicas from which a row has one line, where nothing is amiss with it
const TROUBLE = ["failed", "degraded", "starting", "warming", "leaving", "draining", "stopped"]; // in the order in which they stand
const THERE = ["ready", "degraded", "leaving", "draining"]; // states in which what is known of an engine is of now

const bases = r => r.models.filter(name => !(name in r.adapters));
const served = r => (r.models.length ? bases(r) : r.served_models).join(", "); // while it is away, what it told last

const blocksAbout = r => !THERE.includes(r.state) && r.map_blocks ? "when last heard" : r.num_blocks ? `of ${count(r.num_blocks)}` : "";

function replicaRow(r, recent, whole, most, now, several_models) {
  const f = chosen(recent).replicas[r.id] || {}, last = recent.failures[r.id];
  const requests = f.requests || 0; // a replica that got none lately has no figures
  const rate = f.hit_reported ?? f.hit_predicted ?? null, part = share(requests, whole);
  const calm = r.state === "ready" ? "calm" : "";
  const badEvents = r.events === "gap" || r.events === "unobserved";
  const problem = last ? [make("div", {class: now - last.at < 60 ? "badish" : null}, ago(last.at, now)), make("div", {class: "sub why"}, last.why)] : ["none"];
  return make("tr", {},
    make("td", {}, make("div", {class: "id"}, make("span", {class: "dot " + r.state, "aria-hidden": "true"}), r.id,
        r.role && r.role !== "both" ? make("span", {class: "tag"}, r.role) : null,
        several_models ? make("span", {class: "tag"}, served(r) || "no model yet") : null, make("span", {class: "unseen"}, r.state)),
      make("div", {class: "sub why " + calm}, r.state === "ready" ? "ready for " + span(r.since_seconds) : r.reason.startsWith(r.state) ? r.reason : r.state === "stopped" ? `stopped for ${span(r.since_seconds)}: ${r.reason}` : `${r.state}: ${r.reason}`)),
    cell("Requests", "", `${count(requests)} `, make("span", {class: "sub"}, part == null ? "" : percent(part)), bar(most ? requests / most : 0)),
    cell("In flight", "n", count(r.inflight), make("div", {class: "sub " + (r.waiting ? "" : "calm")}, r.waiting == null ? "" : `${r.waiting} waiting`)),
    cell("Hit rate", "", percent(rate), bar(rate)),
    cell("TTFT", "n", time(f.ttft_p50 ?? null), make("div", {class: "sub calm"}, f.ttft_p99 == null ? "" : `p99 ${time(f.ttft_p99)}`)),
    cell("Whole answer", r.slow ? "n warnish" : "n", time(f.answer_mean ?? null), make("div", {class: "sub calm"}, f.tpot == null ? "" : `${time(f.tpot)} a token`)),
    cell("KV cache used", "", percent(r.kv_usage), bar(r.kv_usage, .9)),
    cell("Blocks known", "n", count(r.map_blocks), make("div", {class: "sub calm"}, blocksAbout(r))),
    cell("KV events", badEvents ? "warnish" : null, r.events),
    cell("Last failure", last ? "wide" : "none", ...problem));
}

function replicas(s, recent) {
  const known = s.replicas, ready = known.filter(r => r.state === "ready").length;
  $("replicas-about").textContent = known.length ? `${ready} of ${known.length} ready; requests, hit rate and times of the last ${window_of(recent)}` : "";
  if (!known.length) {
    fill($("replicas"), make("div", {class: "empty"}, "No replicas. Add one: ",
      make("code", {}, `hitherto replicas add http://HOST:PORT --admin ${location.origin}`)));
    return;
  }
  const requests = known.map(r => chosen(recent).replicas[r.id]?.requests || 0);
  const whole = requests.reduce((sum, x) => sum + x, 0), most = Math.max(...requests);
  const dense = known.length > DENSE, models = new Set(known.map(served).filter(Boolean)).size;
  const heads = [["Replica"], ["Requests"], ["In flight", "n"], ["Hit rate"], ["TTFT", "n"], ["Whole answer", "n"], ["KV cache used"], ["Blocks known", "n"], ["KV events"], ["Last failure"]];
  const order = dense ? [...known].sort((a, b) => harm(a) - harm(b)) : known;
  fill($("replicas"), table("cards" + (dense ? " dense" : ""), heads, order.map(r => replicaRow(r, recent, whole, most, recent.now, models > 1))));
}

function shadows(s) {
  $("shadow").hidden = !s.shadow.length;
  const signed = (x, show) => (x < 0 ? "−" : x > 0 ? "+" : "") + show(Math.abs(x));
  const heads = [["Policy"], ["The same choice"], ["Prefill saved", "n"], ["TTFT saved, predicted", "n"], ["Whole answer, predicted", "n"]];
  const legs = s.shadow.some(one => one.two_legs) ? [["Two legs"]] : [];
  const row = one => make("tr", {},
    make("td", {}, make("div", {class: "id"}, one.policy), make("div", {class: "sub"}, several(one.decisions, "request", "requests"))),
    cell(heads[1][0], "", percent(share(one.same, one.decisions)), bar(share(one.same, one.decisions))),
    cell(heads[2][0], "n", signed(one.saved_prefill_tokens, count) + " tokens", make("div", {class: "sub"}, one.decisions ? signed(one.saved_prefill_tokens / one.decisions, count) + " a request" : "")),
    ...[one.saved_ttft_seconds, one.saved_answer_seconds].map((saved, at) =>
      cell(heads[3 + at][0], "n", one.decisions ? signed(saved / one.decisions, time) : "–", make("div", {class: "sub"}, "a request"))),
    ...legs.map(([name]) => cell(name, "", percent(share(one.two_legs, one.decisions)))));
  fill($("shadows"), table("cards", [...heads, ...legs], s.shadow.map(row)));
}

function admissions(s) {
  $("admission").hidden = !s.admission?.length;
  const heads = [["Class"], ["Sent", "n"], ["Had to wait", "n"], ["p99 of the wait", "n"], ["Refused", "n"], ["Limits kept"], ["TTFT, predicted / delivered", "n"]];
  const kept = one => share(one.met, one.met + one.missed + one.failed);
  const row = one => make("tr", {},
    make("td", {}, make("div", {class: "id"}, one.class)),
    cell(heads[1][0], "n", count(one.admitted + one.observed + one.degraded + one.spilled)),
    cell(heads[2][0], "n", count(one.queued), one.waiting ? make("div", {class: "sub"}, `${count(one.waiting)} now`) : null),
    cell(heads[3][0], "n", time(one.queue_p99_seconds)),
    cell(heads[4][0], "n", count(one.refused), make("div", {class: "sub"}, Object.entries(one.refused_for).map(([why, n]) => `${why} ${count(n)}`).join(", "))),
    cell(heads[5][0], "", percent(kept(one)), bar(kept(one))),
    cell(heads[6][0], "n", one.ttft_seconds == null ? "–" : `${time(one.predicted_ttft_seconds)} / ${time(one.ttft_seconds)}`));
  fill($("admissions"), table("cards", heads, (s.admission || []).map(row)));
}

// What clients feel now, the worst first: [level, whose, what].
function felt(s, recent) {
  const f = recent.figures.minute, rows = [], down = s.replicas.filter(r => ["failed", "degraded"].includes(r.state));
  if (!s.ready) rows.push(["bad", "not ready", s.why_not]);
  for (const model of s.unserved) rows.push(["bad", "not served", `${model}: no replica takes requests for it`]);
  const told = (name, number, what) => number && rows.push([share(number, f.requests) >= .05 ? "bad" : "warn", name,
    `${count(number)} of ${several(f.requests, "request", "requests")} of the last minute ${what} (${percent(share(number, f.requests))})`]);
  const [last] = Object.entries(recent.failures).filter(([, one]) => recent.now - one.at < 60).sort(([, a], [, b]) => b.at - a.at);
  told("errors", f.errors, last ? `failed, last at ${last[0]}: ${last[1].why}` : "failed");
  told("full", f.full, "got 429, as every engine that was asked was full");
  told("engines' key", f.unauthorized, "got 401 or 403 from engines: the API key that these were sent is missing or wrong (--engine-api-key)");
  told("clients' keys", f.keyless, "got 401, as their API key is missing or not known here");
  const which = down.slice(0, 3).map(r => `${r.id} (${r.reason})`).concat(down.length > 3 ? [`${down.length - 3} more`] : []).join(", ");
  if (down.length) rows.push([2 * down.length >= s.replicas.length ? "bad" : "warn", "down", `${down.length} of ${s.replicas.length} replicas ${down.length === 1 ? "is" : "are"} down: ${which}`]);
  const slow = s.replicas.filter(r => r.slow).sort((a, b) => b.slow.times - a.slow.times);
  for (const r of slow) rows.push(["warn", "slow", `${r.id} ${r.slow.text}`]);
  for (const [policy, one] of Object.entries(s.policy_failures || {}))
    rows.push(["warn", "policy", `${policy} failed ${several(one.failures, "time", "times")}, ${span(one.seconds_ago)} ago: ${one.last}`]);
  if (f.refused) rows.push(["warn", "refusing", `${several(f.refused, "request was", "requests were")} refused in the last minute as there was not enough for all`]);
  for (const one of recent.journal) if (one.kind === "limits" && recent.now - one.at < 60)
    rows.push(["warn", "limits", `tenant ${one.text}: ${several(one.times, "request", "requests")} lately`]);
  return [...rows.filter(row => row[0] === "bad"), ...rows.filter(row => row[0] !== "bad")];
}
// The page's verdict in a word: the worst of it.
function verdict(s, recent) {
  const [worst] = felt(s, recent);
  $("ready").className = "pill " + (worst ? worst[0] : "good");
  $("ready").textContent = worst ? worst[1] : "ready";
}

// What is amiss with the gateway itself, with its files and with the Redis that gateways share: [whose, what].
function own(s) {
  const redis = s.map.redis, limits = s.api_keys?.limits, rows = [];
  if (s.api_keys?.problem) rows.push(["API keys", `the file cannot be used, and the keys read before stay good: ${s.api_keys.problem}`]);
  if (s.tls?.problem) rows.push(["TLS", `the files cannot be used, and the certificate read before stays in use: ${s.tls.problem}`]);
  if (s.discovery?.problem) rows.push(["discovery", `pods are as they were told last: ${s.discovery.problem}`]);
  if (limits?.joined === false) rows.push(["limits shared through Redis", `this gateway counts alone: ${limits.reason}`]);
  if (redis?.trouble) rows.push(["map shared through Redis", redis.trouble]);
  if (redis?.ledger_joined === false) rows.push(["load shared through Redis", `this gateway counts alone: ${redis.ledger_reason}`]);
  for (const [work, one] of Object.entries(s.background_failures || {}))
    rows.push(["background work", `${work} failed ${one.failures} times, ${span(one.seconds_ago)} ago with ${one.last}`]);
  return rows;
}
function problems(s, recent) {
  const found = new Map(), add = (r, text) => {
    const cause = text.replaceAll(r.url, "its address").replaceAll(r.id, "it"); // one line for a cause that several have
    found.set(cause, [...(found.get(cause) || []), [r, text]]);
  };
  for (const r of s.replicas) if (r.map_role === "standalone") {
    add(r, `its part of the map is not shared: ${r.map_role_reason}`);
  }
  for (const r of s.replicas) for (const text of r.problems) add(r, text);
  const whose = ids => ids.length === s.replicas.length && ids.length > 1 ? "every replica" : ids.join(", ");
  // Of replicas, what keeps them from answering comes before what makes predictions worse.
  const causes = [...found].sort((a, b) => harm(a[1][0][0]) - harm(b[1][0][0]));
  const rows = [...felt(s, recent).slice(s.ready ? 0 : 1).map(([, name, text]) => [name, text]), ...own(s),
    ...causes.map(([cause, of]) => [whose(of.map(([r]) => r.id)), of.length > 1 ? cause : of[0][1]])];
  $("trouble").hidden = !rows.length;
  fill($("problems"), ...rows.map(([name, text]) => make("li", {}, make("b", {}, name), " ", text)));
}

const harm = r => TROUBLE.includes(r.state) ? TROUBLE.indexOf(r.state) : TROUBLE.length;

function map(s) {
  const m = s.map;
  fill($("map"), make("span", {}, make("b", {}, count(m.blocks)), " blocks"), make("span", {}, make("b", {}, bytes(m.bytes)), " of " + bytes(m.budget_bytes)),
    bar(m.bytes / m.budget_bytes, .95), make("span", {}, make("b", {}, count(m.evicted)), " evicted to stay within it"));
}
