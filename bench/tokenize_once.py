"""What an engine saves when it is sent the token ids, beside what the gateway pays to write them.

    HITHERTO_VLLM=FOLDER python -m bench.tokenize_once [--tokens 8192,1024,128] [--rounds N] [--json FILE]

A real vLLM on the CPU (of that environment) with a tiny model and Qwen3's tokenizer and template, asked directly. Each
request is sent twice, as received and with its ids (`gateway.prompt.forward`), in turn; the order changes from one to
the next. Per path and length:

  engine_ms    CPU time of all the engine's threads a request (utime + stime), where the prompt is cached
  ttft_ms      time to the first byte of the stream, median: one client; and eight at once, where work in the
               engine's API process makes the others wait
  uncached     the same TTFT where nothing of the prompt is cached: this CPU's prefill hides the rest
  gateway_us   CPU time of the gateway for making the body (best of many)
  body_kb      what is sent

A file given with --json keeps the results of other versions that are in it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import sys
import tempfile
import threading
import timeit
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from time import perf_counter

from gateway.prompt.forward import with_ids
from gateway.prompt.pipeline import Pipeline
from tests.gateway.prompt.reference import model_dir
from tests.vllm.engines import Engine, tiny_model, version

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
VARIANTS = ("text", "ids")
AT_ONCE = 8
TURN_TOKENS = 400  # a message of a conversation


@dataclass(frozen=True)
class Pair:
    """One request in both forms."""

    path: str
    text: bytes
    ids: bytes
    tokens: int


class Prose:
    """New text of any length: English sentences from the documentation strings of this interpreter's library."""

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline
        files = sorted(Path(os.__file__).parent.glob("[a-t]*.py"))
        parts = [part for file in files for part in file.read_text(errors="replace").split('"""')[1::2]]
        sentences = " ".join(" ".join(parts).split()).split(". ")
        self.sentences = [(one, len(pipeline.tokenizer.encode(one)) // 4 + 1) for one in sentences if 20 < len(one) < 200]
        self.random = random.Random(1)

    def take(self, tokens: int) -> str:
        """About that many tokens."""
        taken: list[str] = []
        while tokens > 0:
            sentence, length = self.random.choice(self.sentences)
            taken.append(sentence)
            tokens -= length
        return ". ".join(taken)

    def pair(self, name: str, tokens: int) -> Pair:
        fields = {"model": "tiny", "stream": True, "max_tokens": 1, "temperature": 0}
        if name == "chat":
            count = max(1, tokens // TURN_TOKENS)
            messages = [{"role": ("user", "assistant")[turn % 2], "content": self.take(tokens // count)} for turn in range(count | 1)]
            body = json.dumps({**fields, "messages": messages}).encode()
        else:
            body = json.dumps({**fields, "prompt": self.take(tokens)}).encode()
        prompt = self.pipeline.prepare(PATHS[name], body)
        return Pair(PATHS[name], body, with_ids(body, prompt), prompt.tokens)


class Client:
    """One connection to the engine."""

    def __init__(self, engine: Engine):
        self.connection = http.client.HTTPConnection("127.0.0.1", engine.port)

    def ttft(self, path: str, body: bytes) -> float:
        """Send, and read to the end; milliseconds to the first byte of the body."""
        begun = perf_counter()
        self.connection.request("POST", path, body, {"content-type": "application/json"})
        response = self.connection.getresponse()
        first = response.read(6)
        took = perf_counter() - begun
        rest = response.read()
        if response.status != 200 or first != b"data: " or b'"error"' in rest:
            sys.exit(f"the engine answers {response.status}: {(first + rest)[:500]!r}")
        return 1e3 * took


def cpu_seconds(pid: int) -> float:
    """utime + stime of the process, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cached(engine: Engine, pair: Pair, rounds: int) -> dict[str, dict[str, float]]:
    """One client, then eight, in blocks of the same form: CPU time is counted in ticks of 10 ms."""
    client, found = Client(engine), {name: {"engine_ms": [], "ttft_ms": [], "ttft_ms_of_8": []} for name in VARIANTS}
    for name in VARIANTS:
        client.ttft(pair.path, getattr(pair, name))
    for turn in range(4):
        for name in VARIANTS if turn % 2 else VARIANTS[::-1]:
            body, before = getattr(pair, name), cpu_seconds(engine.pid)
            found[name]["ttft_ms"] += [client.ttft(pair.path, body) for _ in range(rounds)]
            found[name]["engine_ms"].append(1e3 * (cpu_seconds(engine.pid) - before) / rounds)
            found[name]["ttft_ms_of_8"] += together(engine, pair.path, body, rounds)
    return {name: {key: round(mean(values) if key == "engine_ms" else median(values), 2) for key, values in one.items()} for name, one in found.items()}


def together(engine: Engine, path: str, body: bytes, rounds: int) -> list[float]:
    took: list[float] = []

    def drive() -> None:
        client = Client(engine)
        took.extend([client.ttft(path, body) for _ in range(max(2, rounds // 4))])

    threads = [threading.Thread(target=drive) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took


def uncached(engine: Engine, prose: Prose, name: str, tokens: int, rounds: int) -> dict[str, float]:
    client, took = Client(engine), {variant: [] for variant in VARIANTS}
    for turn in range(2 * max(2, rounds // 4)):
        pair, variant = prose.pair(name, tokens), VARIANTS[turn % 2]
        took[variant].append(client.ttft(pair.path, getattr(pair, variant)))
    return {variant: round(median(values), 1) for variant, values in took.items()}


def gateway_us(prose: Prose, pair: Pair) -> float:
    prompt = prose.pipeline.prepare(pair.path, pair.text)
    timer = timeit.Timer(lambda: with_ids(pair.text, prompt))
    return round(1e6 * min(timer.repeat(20, 50)) / 50, 1)


def measure(engine: Engine, prose: Prose, name: str, tokens: int, rounds: int) -> dict:
    pair = prose.pair(name, tokens)
    said = {"path": name, "tokens": pair.tokens, "gateway_us": gateway_us(prose, pair)}
    said["body_kb"] = {variant: round(len(getattr(pair, variant)) / 1e3, 1) for variant in VARIANTS}
    said["cached"] = cached(engine, pair, rounds)
    said["uncached_ttft_ms"] = uncached(engine, prose, name, tokens, rounds)
    return said


def show(rows: list[dict]) -> None:
    print(f"{'path':12} {'tokens':>6} | {'engine CPU ms':>17} {'saved':>6} | {'TTFT ms':>15} | {'of 8 at once':>15} | {'uncached':>15} | {'body kB':>13} | gateway us")
    for row in rows:
        text, ids = (row["cached"][name] for name in VARIANTS)
        uncached, body = row["uncached_ttft_ms"], row["body_kb"]
        print(
            f"{row['path']:12} {row['tokens']:6} | {text['engine_ms']:7.2f} > {ids['engine_ms']:7.2f} {text['engine_ms'] - ids['engine_ms']:6.2f}"
            f" | {text['ttft_ms']:6.2f} > {ids['ttft_ms']:6.2f} | {text['ttft_ms_of_8']:6.1f} > {ids['ttft_ms_of_8']:6.1f}"
            f" | {uncached['text']:6.1f} > {uncached['ids']:6.1f} | {body['text']:5.1f} > {body['ids']:5.1f} | {row['gateway_us']:6.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="128,512,2048,8192", help="lengths of prompts (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=16, help="requests of each form in a block (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    args = parser.parse_args()
    if "HITHERTO_VLLM" not in os.environ:
        sys.exit("HITHERTO_VLLM names the folder of a vLLM for CPU; `make test-vllm` makes one")
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder) / "tiny", model_dir("qwen3"))
        prose = Prose(Pipeline(model, "tiny", 16))
        with Engine(model, log=Path(folder) / "log", blocks=2048, events=None) as engine:
            rows = [measure(engine, prose, name, int(tokens), args.rounds) for tokens in args.tokens.split(",") for name in PATHS]
    told = ".".join(map(str, version()))
    print(f"vLLM {told}, Qwen3 tokenizer, tiny model on CPU; as received > with ids")
    show(rows)
    if args.json:
        results = json.loads(args.json.read_text()) if args.json.is_file() else {}
        args.json.write_text(json.dumps({**results, told: rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
