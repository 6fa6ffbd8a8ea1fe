-- The formulas of the rules that choose the least cost, for the script that decides for several gateways at once.
-- They are those of `least_load`, `overlap_cost` and `least_time`, and a test compares them with these.
--
-- request  tokens, output, residual, now, future, after, six coefficients of the TTFT and three of decode steps
-- overlap, lower, fetched  prompt tokens in the first tier and in slower ones, and what the latter are worth
-- load     the replica's `Load`, as a table; speed, pace  its factors for prefill and for decode steps
local costs = {}

function costs.least_load(request, overlap, lower, fetched, load, speed, pace)
  return math.max(load.requests, load.waiting)
end

function costs.overlap_cost(request, overlap, lower, fetched, load, speed, pace)
  return math.max(0, load.prefill_tokens + request[1] - overlap - fetched) + load.context_tokens
end

function costs.least_time(request, overlap, lower, fetched, load, speed, pace)
  local tokens, output, residual, now, future, after, base, token, pair, queued, busy, crowd, step_base, stream, context = unpack(request)
  local prefilling, decoding, recent = load.prefilling, load.decoding, load.recent
  local cached = overlap + lower
  local uncached, held = tokens - cached, load.context_tokens + load.prefill_tokens
  local streams = decoding + prefilling
  local step = pace * (step_base * math.min(1, decoding) + stream * decoding + context * load.context_tokens)
  local own = speed * (token * uncached + pair * uncached * (cached + 0.5 * uncached))
  local begun = load.begun_tokens
  local lasts = speed * (base + token * begun + pair * 0.5 * begun * begun / math.max(1, load.begun)) + crowd * step
  local left = math.min(1, prefilling) * math.min(1, math.abs(1 - (now - load.since) / lasts))
  local queue = speed * (queued * (load.prefill_tokens - begun + left * begun) + busy * left)
  local waits = 0.25 * prefilling + 0.75 * (prefilling - load.begun)
  local short = math.max(0, (held + tokens) / load.capacity_tokens - 0.98)
  local shared = after * output * load.output_tokens / math.max(1, streams * output + load.output_tokens)
  local later = after * output * residual / math.max(1, output + residual)
  local steady = math.max(pace, 1.2) + math.min(pace, 0.8) - 1
  local more = pace * (stream + context * (tokens + 0.5 * output))
  return speed * base + queue + math.max(0, now - load.due) + crowd * step * math.max(1, uncached / 8192) + fetched
    + short * 200 * step + own * (1 + waits + 0.05 * (decoding + future * recent) + 0.2 * load.kv_usage)
    + 0.15 * output * step_base * steady + shared * pace * (stream * streams + context * held)
    + more * (shared * streams + crowd * decoding + (2 * later + crowd) * future * recent)
end

