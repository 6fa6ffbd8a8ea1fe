"use strict";
// Asks every two seconds, shows what is told; and the what-if box.
const PERIOD = 2000;
// Absolute: opened as http://any:TOKEN@host/, a relative URL would have the credentials, and fetch refuses those.
const at = path => location.origin + path;

async function ask(path) {
  const response = await fetch(at(path), {cache: "no-store", signal: AbortSignal.timeout(5000)});
  if (!response.ok) throw new Error(`${path} ${response.status}`);
  return response.json();
}

function show(s, recent) {
  verdict(s, recent);
  $("notice").hidden = !s.why_not;
  $("notice").textContent = s.why_not || "";
  const fact = (name, value) => make("span", {}, name + " ", make("b", {}, value));
  const models = [...new Set([...s.models, ...s.unserved])].sort();
  const workers = s.workers?.length ? fact("workers", String(s.workers.length)) : null;
  fill($("facts"), models.length ? fact(models.length > 1 ? "models" : "model", models.join(", ")) : null, fact("policy", s.policy), workers,
    fact("up", span(s.uptime_seconds)), fact("version", s.version));
  tiles(s, recent); problems(s, recent); replicas(s, recent);
  decisions(recent, s.models.length > 1); prefixes(recent, s); journal(recent);
  admissions(s); shadows(s); map(s); choices(s.models);
  document.title = (felt(s, recent)[0]?.[0] === "bad" ? "! " : "") + "Hitherto";
}

let answered = Date.now(), latest = null, paused = false, timer = 0;
async function poll() {
  try {
    const [status, recent] = await Promise.all([ask("/status"), ask("/recent")]);
    answered = Date.now();
    // Not under a reader's hands: what is selected would be gone.
    if (!paused && getSelection().isCollapsed) show(...(latest = [status, recent]));
    $("age").textContent = paused ? "paused" : "refreshed every 2 s";
  } catch (error) {
    $("ready").className = "pill bad";
    $("ready").textContent = "no answer";
    $("notice").hidden = false;
    $("notice").textContent = `The gateway has not answered for ${Math.round((Date.now() - answered) / 1000)} s (${error.message}). The figures below are the last known.`;
  }
  timer = setTimeout(poll, document.hidden ? 5 * PERIOD : PERIOD);
}
$("window").addEventListener("change", () => latest && show(...latest));
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  $("pause").textContent = paused ? "Go on" : "Pause";
  clearTimeout(timer);
  poll();
});

// --- what if

function choices(models) {
  $("ask-model-label").hidden = models.length < 2;
  const select = $("ask-model"), shown = [...select.options].map(one => one.value);
  if (shown.join("\n") !== models.join("\n")) fill(select, ...models.map(name => make("option", {value: name}, name)));
}
// The request that a client would send, and its path. A body keeps its own model.
function request(text) {
  const typed = text.trim(), model = $("ask-model").value;
  const given = /^[{[]/.test(typed) ? JSON.parse(typed) : [{role: "user", content: text}];
  const body = Array.isArray(given) ? {messages: given} : given;
  if (model && body.model == null) body.model = model;
  const path = body.messages ? "/v1/chat/completions" : "prompt" in body ? "/v1/completions" : "input" in body ? "/v1/responses" : "/v1/chat/completions";
  return [path, body];
}
async function answer(text) {
  const [path, body] = request(text);
  const response = await fetch(at("/explain?path=" + encodeURIComponent(path)), {
    method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body), signal: AbortSignal.timeout(30000)});
  const told = await response.json();
  if (!response.ok) throw new Error(told.error?.message || `status ${response.status}`);
  return told;
}
function answered_with(told) {
  const rows = [...told.replicas].sort((a, b) => (b.chosen - a.chosen) || (a.seconds ?? a.answer_seconds) - (b.seconds ?? b.answer_seconds));
  const weighed = rows[0].seconds != null, heads = [["Replica"], ["Holds"], ["In flight", "n"], ["First token", "n"], [weighed ? "Cost" : "Whole answer", "n"]];
  const held = one => told.tokens - one.uncached_tokens;
  const row = one => make("tr", {},
    make("td", {}, make("span", {class: "id"}, make("span", {class: "dot " + (one.chosen ? "good" : ""), "aria-hidden": "true"}), one.id, one.chosen ? make("span", {class: "tag"}, "chosen") : one.tied ? make("span", {class: "tag"}, "costs the same") : null)),
    cell("Holds", "", `${count(held(one))} tokens`, bar(share(held(one), told.tokens))),
    cell("In flight", "n", count(one.load.requests)),
    cell("First token", "n", time(one.ttft_seconds)),
    cell(heads[4][0], "n", time(weighed ? one.seconds : one.answer_seconds)));
  const about = told.mode === "load" ? `routed by load alone${told.note ? ": " + told.note : ""}` : `${several(told.tokens, "token", "tokens")}, ${told.mode}${told.note ? ": " + told.note : ""}`;
  const more = rows.length > 8 ? make("div", {class: "sub"}, `and ${rows.length - 8} more`) : null;
  return [make("div", {class: "said"}, ...sentence(told.sentence, told.legs ? told.legs.prefill : told.choice)), make("div", {class: "sub"}, about), table("cards", heads, rows.slice(0, 8).map(row)), more];
}
$("ask").addEventListener("submit", async event => {
  event.preventDefault();
  const text = $("ask-text").value;
  if (!text.trim()) { $("ask-text").focus(); return; }
  try {
    fill($("ask-answer"), ...answered_with(await answer(text)));
  } catch (error) {
    fill($("ask-answer"), make("div", {class: "badish"}, error instanceof SyntaxError ? `This is no JSON: ${error.message}` : `It would be refused: ${error.message}`));
  }
});
$("ask-text").addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
});

poll();
