"""The command line of one simulated engine: `hitherto replica` and `python -m replicas.simulated`."""

import argparse
import asyncio
import logging
import signal
import sys
from dataclasses import fields
from pathlib import Path

from replicas.arguments import positive, whole
from replicas.ports import cannot_listen, port

ABOUT = "It has the endpoints, metrics and KV events of vLLM."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a simulated engine to `parser`.

    Flags that vLLM has too mean the same. Flags that replace a field of the profile have the field's name.
    """
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=port, default=8000, help="port, 0 for a free one (default: %(default)s)")
    add("--model", metavar="DIR", help="folder with tokenizer.json and a chat template (default: the demo model)")
    add("--served-model-name", default="sim", metavar="NAME", help="default: %(default)s")
    about = "how fast and how large the engine is: gpu-8b, cpu-tiny or a YAML file (default: %(default)s)"
    add("--profile", default="gpu-8b", metavar="NAME|FILE", help=about)
    add("--speedup", type=positive, metavar="X", help="run X times as fast as the profile says")
    about = "KV blocks, instead of the profile's; where decode times follow the share in use (gpu-8b), more are faster"
    add("--num-blocks", type=whole, metavar="N", help=about)
    add("--block-size", type=whole, metavar="N", help="tokens in a block, instead of the profile's")
    about = "the type that its cache is said to have: engines of unlike ones pass no caches on (default: %(default)s)"
    add("--kv-cache-dtype", default="auto", metavar="TYPE", help=about)
    add("--max-model-len", type=whole, metavar="N", help="context length, instead of the profile's")
    add("--max-num-seqs", type=whole, metavar="N", help="requests that run at once")
    about = "which request goes next: the one that came first, or the one of the lowest priority"
    add("--scheduling-policy", choices=("fcfs", "priority"), help=about)
    add("--max-num-batched-tokens", type=whole, metavar="N", help="tokens in one step")
    add("--lora", action="append", default=[], metavar="NAME", help="serve an adapter; may be repeated")
    add("--events-port", type=port, default=0, metavar="PORT", help="ZMQ port for KV events (default: a free one)")
    add("--replay-port", type=port, default=0, metavar="PORT", help="ZMQ port for their replay")
    add("--no-events", action="store_true", help="publish no KV events, which is vLLM's default")
    add("--no-cached-tokens", action="store_true", help="leave cached_tokens out of usage, which is vLLM's default")
    about = "pass caches on as vLLM with NIXL (default), with Mooncake's connector, or as one behind llm-d's sidecar"
    wires = ("nixl", "llm-d", "mooncake")
    add("--kv-connector", nargs="?", const="nixl", metavar="WIRE", choices=wires, help=about)
    add("--api-key", metavar="KEY", help="asked for on all paths but /health; vLLM asks for it below /v1 alone")
    add("--seed", type=int, default=0, help="of the replies' text and of the block keys")
    add = parser.add_argument_group("host memory behind the cache, as vLLM's offloading connector has it").add_argument
    add("--cpu-blocks", type=int, metavar="N", help="KV blocks that host memory has room for")
    add("--chunk-blocks", type=whole, metavar="N", help="KV blocks that are moved at a time")
    about = "host memory is that of LMCache's server: chunks of 256 tokens unless --chunk-blocks says otherwise"
    add("--lmcache", action="store_true", default=None, help=about)
    add = parser.add_argument_group("further cache groups, as of models whose layers are not all alike").add_argument
    about = "the sliding window of each group beside that of full attention, 0 for Mamba layers"
    add("--windows", type=int, nargs="+", metavar="TOKENS", help=about)
    about = "which of their blocks can be hits: those that a later prompt can resume at (vLLM 0.32), or all (0.28)"
    add("--retention", choices=("replay", "all"), help=about)
    about = "so many GPUs share each block, and /metrics tells one GPU's part of --block-size, as vLLM before 0.32 does"
    add("--decode-context-parallel-size", dest="context_parallel", type=whole, metavar="N", help=about)
    about = "compute the last block of what is found again, as vLLM does with EAGLE and MTP"
    add("--drops-block", action="store_true", default=None, help=about)


def _profile(args: argparse.Namespace):
    """Return the profile, with the flags that were given in place of its fields."""
    from .offload import LMCACHE_TOKENS
    from .profile import Profile, load_profile

    changes = {field.name: getattr(args, field.name, None) for field in fields(Profile)}
    if args.windows is not None:
        changes["windows"] = tuple(args.windows)
    if args.lmcache and not args.chunk_blocks:
        changes["chunk_blocks"] = LMCACHE_TOKENS // (args.block_size or load_profile(args.profile).block_size)
    return load_profile(args.profile, **changes)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; return 2 for an invalid flag, 1 if the engine fails."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    try:
        profile = _profile(args)
        from .model import sim_model_dir

        model_dir = Path(args.model) if args.model else sim_model_dir()
        if not (model_dir / "tokenizer.json").is_file():
            raise ValueError(f"--model {model_dir}: no tokenizer.json there")
    except (ValueError, OSError) as error:
        return _refuse(error)
    import uvloop

    return uvloop.run(_serve(args, profile, model_dir))


def _refuse(why: object) -> int:
    print(f"hitherto replica: {why}", file=sys.stderr)
    return 2


def _load(model_dir: Path, seed: int) -> tuple:
    """Return the model's `Tokens` and `Replies`. Raises ValueError if they cannot be made."""
    from .replies import Replies
    from .tokens import Tokens

    try:
        tokens = Tokens(model_dir)
        return tokens, Replies(tokens, seed)
    except Exception as error:  # errors of the tokenizers' own types
        raise ValueError(f"--model {model_dir}: {error}") from error


async def _serve(args: argparse.Namespace, profile, model_dir: Path) -> int:
    from .publisher import Publisher

    try:
        publisher = None if args.no_events else Publisher(args.host, args.events_port, args.replay_port, profile)
        runner, http, port = await _listen(args, profile, model_dir, publisher)
    except OSError as error:
        return _refuse(cannot_listen(args.host, args.port, error))
    except ValueError as error:
        return _refuse(error)
    name, size = args.served_model_name, f"{profile.num_blocks} blocks of {profile.block_size}"
    events = f"on {publisher.port}, replay on {publisher.replay_port}" if publisher else "off"
    url = f"http://{args.host}:{port}"
    logging.info("simulated engine %s (%s, %s) on %s, events %s", name, profile.name, size, url, events)
    return await _until_told(runner, publisher, http)


async def _listen(args: argparse.Namespace, profile, model_dir: Path, publisher):
    """Start the engine and its server; return the engine's runner, the server and its port.

    Raises OSError and ValueError.
    """
    loading = asyncio.get_running_loop().run_in_executor(None, _load, model_dir, args.seed)
    from aiohttp import web

    from .engine import Engine
    from .metrics import Metrics
    from .runner import Runner
    from .server import HEAD_BYTES, KEEP_ALIVE, Server
    from .transfers import Transfers

    tokens, replies = await loading
    engine, wire = Engine(profile, every_token=True), args.kv_connector
    metrics = Metrics(engine, args.served_model_name, args.kv_cache_dtype, wire in ("nixl", "llm-d"))
    runner = Runner(engine, metrics, publisher, args.seed)
    transfers = Transfers(wire, kind=f"{args.kv_cache_dtype} {model_dir}")
    shows_cached, named = not args.no_cached_tokens, (args.served_model_name, str(model_dir), args.lora)
    server = Server(runner, tokens, replies, *named, shows_cached, transfers, args.api_key)
    limits = {"max_line_size": HEAD_BYTES, "max_field_size": HEAD_BYTES, "keepalive_timeout": KEEP_ALIVE}
    http = web.AppRunner(server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0, **limits)
    await http.setup()
    site = web.TCPSite(http, args.host, args.port, backlog=1024, reuse_address=True)
    await site.start()
    return runner, http, site._server.sockets[0].getsockname()[1]


async def _until_told(runner, publisher, http) -> int:
    """Run until SIGTERM or SIGINT, or until one of the engine's tasks fails, as a dead engine must not look alive.

    Returns the exit status: 0 after a signal, 1 after a failure.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    tasks = [asyncio.ensure_future(runner.run()), asyncio.ensure_future(stop.wait())]
    if publisher is not None:
        tasks.append(asyncio.ensure_future(publisher.serve_replay()))
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    failed = [task for task in done if task.exception() is not None]
    for task in failed:
        logging.error("the engine failed", exc_info=task.exception())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await http.cleanup()
    if publisher is not None:
        publisher.close()
    return 1 if failed else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hitherto replica", description=f"Run one simulated engine. {ABOUT}")
    add_arguments(parser)
    return run(parser.parse_args(argv))
