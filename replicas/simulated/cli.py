"""The command line of one simulated engine: `hitherto replica` and `python -m replicas.simulated`."""

import argparse
import asyncio
import logging
import signal
import sys
from itertools import combinations
from pathlib import Path

from replicas.arguments import positive, whole
from replicas.ports import cannot_listen, port

ABOUT = "Run one simulated engine behind the endpoints, metrics and KV events of vLLM."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags; those that vLLM has too mean the same as there."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=port, default=8000, help="port, 0 for a free one (default: %(default)s)")
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="folder with tokenizer.json and a chat template (default: the bundled demo model)",
    )
    parser.add_argument("--served-model-name", default="sim", metavar="NAME", help="default: %(default)s")
    parser.add_argument(
        "--profile",
        default="gpu-8b",
        metavar="NAME|FILE",
        help="how fast and how large the engine is: gpu-8b, cpu-tiny or a YAML file (default: %(default)s)",
    )
    parser.add_argument("--speedup", type=positive, metavar="X", help="run X times as fast as the profile says")
    parser.add_argument(
        "--num-blocks",
        type=whole,
        metavar="N",
        help="KV blocks, instead of the profile's; where that has decode times by the share of the cache in use, as gpu-8b, "
        "more of them also make it faster",
    )
    parser.add_argument("--block-size", type=whole, metavar="N", help="tokens in a block, instead of the profile's")
    parser.add_argument(
        "--kv-cache-dtype",
        default="auto",
        metavar="TYPE",
        help="the type that its cache is said to have: engines of unlike ones pass no caches on (default: %(default)s)",
    )
    parser.add_argument("--max-model-len", type=whole, metavar="N", help="context length, instead of the profile's")
    parser.add_argument("--max-num-seqs", type=whole, metavar="N", help="requests that run at once")
    parser.add_argument(
        "--scheduling-policy",
        choices=("fcfs", "priority"),
        help="who waits goes first come first served, or by priority",
    )
    parser.add_argument("--max-num-batched-tokens", type=whole, metavar="N", help="tokens in one step")
    group = parser.add_argument_group("host memory behind the cache, as vLLM's offloading connector has it")
    group.add_argument("--cpu-blocks", type=int, metavar="N", help="KV blocks that host memory has room for")
    group.add_argument("--chunk-blocks", type=whole, metavar="N", help="KV blocks that are moved at a time")
    group.add_argument(
        "--lmcache",
        action="store_true",
        help="host memory is that of LMCache's server: chunks of 256 tokens unless --chunk-blocks says otherwise",
    )
    group.add_argument(
        "--no-self-describing-events",
        action="store_true",
        help="tell of copies in host memory by key alone, which is vLLM's default",
    )
    group = parser.add_argument_group("further cache groups, as of models whose layers are not all alike")
    group.add_argument(
        "--windows",
        type=int,
        nargs="+",
        metavar="TOKENS",
        help="the sliding window of each group beside that of full attention, 0 for Mamba layers",
    )
    group.add_argument(
        "--retention",
        choices=("replay", "all"),
        help="which of their blocks can be hits: those that a later prompt can resume at (vLLM 0.32), or all (0.28)",
    )
    group.add_argument(
        "--decode-context-parallel-size",
        type=whole,
        metavar="N",
        help="so many GPUs share each block, and /metrics tells one GPU's part of --block-size, as vLLM before 0.32 does",
    )
    group.add_argument(
        "--drops-block",
        action="store_true",
        help="compute the last block of what is found again, as vLLM does with EAGLE and MTP",
    )
    parser.add_argument("--lora", action="append", default=[], metavar="NAME", help="serve an adapter; may be repeated")
    parser.add_argument(
        "--events-port",
        type=port,
        default=0,
        metavar="PORT",
        help="ZMQ port for KV events (default: a free one, see /kv_event_sources)",
    )
    parser.add_argument("--replay-port", type=port, default=0, metavar="PORT", help="ZMQ port for their replay")
    parser.add_argument("--events-topic", default="", metavar="TOPIC", help="topic of the events (default: empty)")
    parser.add_argument("--no-events", action="store_true", help="publish no KV events, which is vLLM's default")
    parser.add_argument(
        "--no-cached-tokens", action="store_true", help="leave cached_tokens out of usage, which is vLLM's default"
    )
    parser.add_argument(
        "--kv-connector", nargs="?", const="nixl", metavar="WIRE",
        choices=("nixl", "llm-d", "mooncake"),
        help="pass prompts' caches on to other engines, as vLLM with NIXL does (nixl, the default), as one behind llm-d's sidecar (llm-d), or as "
        "vLLM with Mooncake's connector (mooncake), whose bootstrap server is the engine itself",
    )  # fmt: skip
    parser.add_argument(
        "--api-key", metavar="KEY", help="asked for on all paths but /health; vLLM asks for it below /v1 alone"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the replies' text and of the block keys")


def _profile(args: argparse.Namespace):
    from .profile import load_profile

    return load_profile(
        args.profile,
        speedup=args.speedup,
        num_blocks=args.num_blocks,
        block_size=args.block_size,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        scheduling_policy=args.scheduling_policy,
        max_num_batched_tokens=args.max_num_batched_tokens,
        cpu_blocks=args.cpu_blocks,
        chunk_blocks=args.chunk_blocks or _chunk_blocks(args),
        lmcache=args.lmcache or None,
        windows=tuple(args.windows) if args.windows is not None else None,
        retention=args.retention,
        context_parallel=args.decode_context_parallel_size,
        drops_block=args.drops_block or None,
    )


def _chunk_blocks(args: argparse.Namespace) -> int | None:
    """Return the blocks of an LMCache chunk; None for the profile's."""
    if not args.lmcache:
        return None
    from .lmcache import CHUNK_TOKENS
    from .profile import load_profile

    return CHUNK_TOKENS // (args.block_size or load_profile(args.profile).block_size)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; return 2 for an invalid flag, 1 if the engine fails."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    try:
        _check_ports(args)
        profile = _profile(args)
        from .model import sim_model_dir

        model_dir = Path(args.model) if args.model else sim_model_dir()
        if not (model_dir / "tokenizer.json").is_file():
            raise ValueError(f"--model {model_dir}: no tokenizer.json there")
    except (ValueError, OSError) as error:
        print(f"hitherto replica: {error}", file=sys.stderr)
        return 2
    import uvloop

    return uvloop.run(_serve(args, profile, model_dir))


def _check_ports(args: argparse.Namespace) -> None:
    """Raise ValueError if two servers of this engine were given one port."""
    given = {"--port": args.port}
    if not args.no_events:
        given |= {"--events-port": args.events_port, "--replay-port": args.replay_port}
    for one, other in combinations(given, 2):
        if given[one] == given[other] != 0:
            raise ValueError(f"{one} and {other} cannot share {given[one]}")


def _load(model_dir: Path, seed: int) -> tuple:
    """Return the model's tokenizer and replies. Raises ValueError if they cannot be made."""
    from .replies import Replies
    from .tokens import Tokens

    try:
        tokens = Tokens(model_dir)
        return tokens, Replies(tokens, seed)
    except Exception as error:  # errors of the tokenizers' own types
        raise ValueError(f"--model {model_dir}: {error}") from error


async def _serve(args: argparse.Namespace, profile, model_dir: Path) -> int:
    publisher = None
    try:
        publisher = _publisher(args, profile)
        runner, http, port = await _listen(args, profile, model_dir, publisher)
    except OSError as error:
        print(f"hitherto replica: {cannot_listen(args.host, args.port, error)}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"hitherto replica: {error}", file=sys.stderr)
        return 2
    logging.info(
        "simulated engine %s (%s, %d blocks of %d) on http://%s:%d, events %s",
        args.served_model_name,
        profile.name,
        profile.num_blocks,
        profile.block_size,
        args.host,
        port,
        f"on {publisher.port}, replay on {publisher.replay_port}" if publisher else "off",
    )
    return await _until_told(runner, publisher, http)


def _publisher(args: argparse.Namespace, profile):
    """Return the publisher of KV events, or None."""
    from .publisher import Publisher

    if args.no_events:
        return None
    return Publisher(
        args.host,
        args.events_port,
        args.replay_port,
        profile.block_size,
        args.events_topic,
        not args.no_self_describing_events,
        profile.chunk_blocks,
        profile.windows,
        profile.lmcache,
    )


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
    from .wires import WIRES

    tokens, replies = await loading
    engine = Engine(profile, every_token=True)
    metrics = Metrics(engine, args.served_model_name)
    metrics.cache_dtype, metrics.has_nixl = args.kv_cache_dtype, args.kv_connector in ("nixl", "llm-d")
    runner = Runner(engine, metrics, publisher, args.seed)
    server = Server(
        runner,
        tokens,
        replies,
        metrics,
        publisher,
        args.served_model_name,
        str(model_dir),
        args.lora,
        not args.no_cached_tokens,
        Transfers(kind=f"{args.kv_cache_dtype} {model_dir}") if args.kv_connector else None,
        args.api_key,
        WIRES[args.kv_connector or "nixl"],
    )
    http = web.AppRunner(
        server.app(),
        handler_cancellation=True,
        keepalive_timeout=KEEP_ALIVE,
        access_log=None,
        shutdown_timeout=1.0,
        max_line_size=HEAD_BYTES,
        max_field_size=HEAD_BYTES,
    )
    await http.setup()
    site = web.TCPSite(http, args.host, args.port, backlog=1024, reuse_address=True)
    await site.start()
    return runner, http, site._server.sockets[0].getsockname()[1]


async def _until_told(runner, publisher, http) -> int:
    """Run until a signal (0) or until one of the engine's tasks fails (1): a dead engine must not look alive."""
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
    parser = argparse.ArgumentParser(prog="hitherto replica", description=ABOUT)
    add_arguments(parser)
    return run(parser.parse_args(argv))
