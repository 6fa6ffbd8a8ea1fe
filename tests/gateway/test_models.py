"""Several models behind one gateway, each exact: a gateway process before simulated engines of unlike models and
variants."""

import json
import shutil
from pathlib import Path

import httpx
import pytest
from aiohttp import web

from replicas.simulated.model import sim_model_dir

from .running import counted, running

PROSE = "All the world's a stage, and all the men and women merely players. "


def other_model(folder: Path, name: str = "") -> str:
    """A model with another tokenizer than the demo's, of which half of the merges are gone, and another chat
    template."""
    shutil.copytree(sim_model_dir(), folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    merges = tokenizer["model"]["merges"]
    tokenizer["model"]["merges"] = merges[: len(merges) // 2]
    path.write_text(json.dumps(tokenizer))
    template = folder / "chat_template.jinja"
    template.write_text("Speak plainly." + name + template.read_text())
    return str(folder)


async def ask(gateway, model: str, text: str, **fields) -> tuple[int, int]:
    """Cached tokens of a chat, as predicted and as the engine reports."""
    reply = await gateway.chat([{"role": "user", "content": text}], model=model, **fields)
    assert reply.status_code == 200, reply.text
    return int(reply.headers["x-hitherto-cached-tokens"]), reply.json()["usage"]["prompt_tokens_details"][
        "cached_tokens"
    ]


async def held(gateway, model: str, text: str) -> int:
    """Ask until the prompt's blocks were reported by events; how many tokens of it are held. Nothing is ever predicted
    too high."""
    for _ in range(200):
        predicted, reported = await ask(gateway, model, text)
        assert predicted <= reported
        if predicted and predicted == reported:
            return predicted
    raise AssertionError("what is held is never predicted")


async def compared(gateway, count: int) -> dict:
    """The status, once all engines' tokenizers were found to be the gateway's."""
    await gateway.ready(count)
    return await gateway.until(
        lambda status: sum(one["tokenizer"].startswith("the gateway's") for one in status["replicas"]) == count
    )


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> str:
    return other_model(tmp_path_factory.mktemp("models") / "other")


async def test_each_model_has_its_own_tokens_blocks_and_context(start_engine, other):
    long = start_engine(
        "--served-model-name", "long", "--max-model-len", "131072", "--num-blocks", "9000", "--lora", "red"
    )
    short = start_engine(
        "--model", other, "--served-model-name", "short", "--block-size", "32", "--max-model-len", "512"
    )
    async with running("--replica-url", long.wait().url, short.wait().url) as gateway:
        await compared(gateway, 2)
        told = {one["id"]: one["max_model_len"] for one in (await gateway.client.get("/v1/models")).json()["data"]}
        assert told == {"long": 131072, "red": 131072, "short": 512}
        assert await held(gateway, "long", PROSE * 150) > 2000
        assert await held(gateway, "red", PROSE * 150) > 2000
        assert await held(gateway, "short", PROSE * 10) % 32 == 0
        refused = await gateway.chat([{"role": "user", "content": PROSE * 150}], model="short")
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
        assert "512" in refused.json()["error"]["message"]
        spaces = (await gateway.status())["spaces"]
        assert {(*one["models"],): (one["block_size"], one["max_model_len"]) for one in spaces} == {
            ("long",): (16, 131072),
            ("short",): (32, 512),
        }
        assert set((await gateway.status())["totals"]["prompts"]) == {"exact"}


async def test_variants_are_told_when_they_change_and_engines_that_are_alike_are_none(start_engine, other):
    flags = ("--model", other, "--served-model-name")
    alike, small = start_engine(*flags, "b"), start_engine(*flags, "c", "--block-size", "32")
    twin, large = start_engine(*flags, "b"), start_engine(*flags, "c", "--block-size", "64")
    urls = [one.wait().url for one in (alike, small, twin, large)]
    async with running("--replica-url", *urls) as gateway:
        await compared(gateway, 4)
        log = b"".join(gateway.log)
        assert b"no files here" not in log and b"model b" not in log
        assert log.count(b"are a variant") == log.count(b"prompts are prepared for 2 variants") == 1


@pytest.fixture
async def reranker():
    """An engine that serves one model, which ranks and transcribes, and refuses any other as vLLM does. It has no
    tokenizer here."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response(
            {
                "object": "list",
                "data": [
                    {"id": "ranker", "object": "model", "root": "/models/ranker", "parent": None, "max_model_len": 512}
                ],
            }
        )

    async def serve(request: web.Request) -> web.Response:
        said = await (request.json() if request.content_type == "application/json" else request.post())
        if said.get("model", "ranker") != "ranker":
            return web.json_response({"error": {"message": "The model does not exist.", "code": 404}}, status=404)
        return web.json_response({"object": "served", "path": request.path})

    async def well(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(client_max_size=1 << 24)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", well)
    for path in ("/v1/rerank", "/v1/score", "/classify", "/pooling", "/v1/audio/transcriptions"):
        app.router.add_post(path, serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    await runner.cleanup()


async def test_what_is_only_passed_on_goes_to_replicas_that_serve_its_model(start_engine, reranker):
    chat = start_engine().wait()
    async with running("--replica-url", chat.url, reranker, "--policy", "round_robin") as gateway:
        await gateway.ready(2)
        for path in ("/v1/rerank", "/v1/score", "/classify", "/pooling") * 2:
            # the long one is looked at in a thread
            body = {"model": "ranker", "query": "x", "documents": [PROSE] * (2000 if path == "/classify" else 1)}
            answer = await gateway.client.post(path, json=body)
            assert answer.status_code == 200 and answer.json()["path"] == path, answer.text
        for _ in range(4):
            form = {"data": {"model": "ranker"}, "files": {"file": ("a.wav", b"\0" * 300_000)}}
            assert (await gateway.client.post("/v1/audio/transcriptions", **form)).status_code == 200
        unknown = await gateway.client.post("/v1/rerank", json={"model": "nobody", "query": "x"})
        assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"
        assert "ranker, sim" in unknown.json()["error"]["message"]


async def test_replicas_of_one_model_with_contexts_of_unlike_length_get_the_prompts_that_fit(start_engine):
    small, large = start_engine("--max-model-len", "512"), start_engine("--max-model-len", "16384")
    async with running("--replica-url", small.wait().url, large.wait().url, "--policy", "round_robin") as gateway:
        await compared(gateway, 2)
        used = []
        for _ in range(4):
            long = await gateway.chat([{"role": "user", "content": PROSE * 100}])
            assert long.status_code == 200, long.text
            used.append(long.headers["x-hitherto-replica"])
            # the prompt fits both, its answer one
            room = await gateway.chat([{"role": "user", "content": "Say much."}], max_tokens=700)
            assert room.status_code == 200, room.text
            used.append(room.headers["x-hitherto-replica"])
        assert set(used) == {f"127.0.0.1:{large.port}"}
        short = {
            (await gateway.chat([{"role": "user", "content": "Hello."}])).headers["x-hitherto-replica"]
            for _ in range(4)
        }
        assert len(short) == 2
        assert (await gateway.chat([{"role": "user", "content": PROSE * 2000}])).status_code == 400
        large.process.kill()
        await gateway.until(lambda status: sum(one["state"] == "ready" for one in status["replicas"]) == 1)
        waits = await gateway.chat([{"role": "user", "content": PROSE * 100}])
        assert waits.status_code == 503 and "16384" in waits.json()["error"]["message"]


async def test_variants_of_one_model_are_each_predicted_exactly(start_engine, tmp_path):
    """Blocks of 16 and 32 tokens, and files that were changed on disk between two starts, behind one name and without a
    restart."""
    folder = Path(other_model(tmp_path / "model"))
    flags = ("--model", str(folder), "--served-model-name", "sim")
    first, second = start_engine(*flags), start_engine(*flags, "--block-size", "32")
    async with running("--replica-url", first.wait().url, second.wait().url, "--policy", "round_robin") as gateway:
        await compared(gateway, 2)
        text = PROSE * 60

        async def each(count: int) -> dict[str, int]:
            """What each replica was found to hold."""
            found: dict[str, int] = {}
            for _ in range(200):
                reply = await gateway.chat([{"role": "user", "content": text}])
                predicted, reported = (
                    int(reply.headers["x-hitherto-cached-tokens"]),
                    reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"],
                )
                assert predicted <= reported
                if predicted and predicted == reported:
                    found[reply.headers["x-hitherto-replica"]] = predicted
                if len(found) == count:
                    return found
            raise AssertionError(f"what is held is never predicted: {found}")

        held = await each(2)
        assert b"no files here" not in b"".join(gateway.log), "they were only looked for"
        assert sorted(one["block_size"] for one in (await gateway.status())["spaces"]) == [16, 32]
        assert b"blocks of 32 tokens instead of 16" in b"".join(
            gateway.log
        ) or b"blocks of 16 tokens instead of 32" in b"".join(gateway.log)
        template = folder / "chat_template.jinja"
        template.write_text("Be brief. Be clear. Be kind, and say nothing that is not so. " + template.read_text())
        port = first.port
        first.stop()
        again = start_engine(*flags, "--port", str(port)).wait()
        await gateway.until(lambda _: any(b"the files in" in line for line in gateway.log))
        await compared(gateway, 2)
        assert again.port == port
        anew = await each(2)
        assert anew[f"127.0.0.1:{port}"] > held[f"127.0.0.1:{port}"]
        page = (await gateway.admin.get("/metrics")).text
        assert counted(page, "hitherto_predictions_total", outcome="over") == 0
        assert set((await gateway.status())["totals"]["prompts"]) == {"exact"}


@pytest.mark.parametrize("given, said", [(16, "its KV events cannot be"), (64, "leave out up to 32 cached tokens")])
async def test_a_block_size_that_is_not_the_engines_is_a_problem_of_the_replica(start_engine, given, said):
    engine = start_engine("--block-size", "32").wait()
    async with running("--replica-url", engine.url, "--block-size", str(given)) as gateway:
        await compared(gateway, 1)
        short = 0
        for number in range(8):
            for asked_again in (False, True):
                reply = await gateway.chat(
                    [{"role": "user", "content": f"{number} {PROSE * 9}{'word ' * 16 * number}"}]
                )
                if asked_again and given > 32:
                    predicted = int(reply.headers["x-hitherto-cached-tokens"])
                    missed = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] - predicted
                    assert missed in (0, 32)
                    short += missed > 0
        assert short or given < 32
        (replica,) = (await gateway.status())["replicas"]
        (problem,) = [one for one in replica["problems"] if one.startswith(f"block_size is set to {given} tokens")]
        assert said in problem and problem.endswith("leave --block-size out; it is learned from each replica")
        what, _, remedy = problem.partition(": ")
        assert sum(f"{what}. To mend it, {remedy}".encode() in line for line in gateway.log) == 1


async def test_an_engine_with_another_tokenizer_does_not_make_the_others_inexact(start_engine, other):
    """As with vLLM's --tokenizer, which nothing tells: the same name, and other tokens than the rest."""
    good, odd = start_engine(), start_engine("--model", other, "--served-model-name", "sim")
    async with running(
        "--model", str(sim_model_dir()), "--replica-url", good.wait().url, odd.wait().url, "--policy", "round_robin"
    ) as gateway:
        status = await gateway.until(
            lambda status: (
                len(status["spaces"]) == 2 and all("not compared" not in one["tokenizer"] for one in status["replicas"])
            )
        )
        assert sorted(one["tokenizer"].partition(":")[0].partition(",")[0] for one in status["replicas"]) == [
            "differs",
            "the gateway's",
        ]
        for _ in range(50):
            reply = await gateway.chat([{"role": "user", "content": PROSE * 20}])
            if (
                reply.headers["x-hitherto-replica"] == f"127.0.0.1:{good.port}"
                and int(reply.headers["x-hitherto-cached-tokens"]) > 200
            ):
                break
        else:
            raise AssertionError("the replica with the gateway's tokenizer is never predicted to hold anything")
        assert {"exact", "text"} <= set((await gateway.status())["totals"]["prompts"])


async def test_a_model_that_is_away_is_not_answered_for_by_another(start_engine, other):
    """Its replica is restarted: what it would take is refused for now, not for good by another model's context, files
    or endpoints."""
    long = start_engine(
        "--served-model-name", "long", "--max-model-len", "131072", "--num-blocks", "9000", "--lora", "red"
    ).wait()
    short = start_engine("--model", other, "--served-model-name", "short", "--max-model-len", "512").wait()
    async with running("--replica-url", long.url, short.url) as gateway:
        await compared(gateway, 2)
        long.process.kill()
        await gateway.until(lambda status: sum(one["state"] == "ready" for one in status["replicas"]) == 1)
        for model in ("long", "red"):
            answer = await gateway.chat([{"role": "user", "content": PROSE * 150}], model=model)
            assert answer.status_code == 503, answer.text
            answer = await gateway.client.post("/v1/rerank", json={"model": model, "query": "x", "documents": ["y"]})
            assert answer.status_code == 503, answer.text
        ready = (await gateway.admin.get("/readyz")).json()
        assert ready == {"ready": True, "why_not": None, "models": {"long": False, "red": False, "short": True}}
        assert (await gateway.admin.get("/readyz", params={"model": "red"})).status_code == 503
        assert (await gateway.admin.get("/readyz", params={"model": "short"})).status_code == 200
        answer = await gateway.chat([{"role": "user", "content": PROSE * 150}], model="nobody")
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found", answer.text


async def test_a_model_whose_engine_was_down_before_the_gateway_began_is_not_refused_for_good(
    start_engine, unused_tcp_port
):
    """Engines load for minutes, a gateway starts in seconds, and no client repeats what got a 404."""
    qwen, down = start_engine("--served-model-name", "qwen").wait(), f"127.0.0.1:{unused_tcp_port}"
    async with running("--replica-url", f"http://{down}", qwen.url) as gateway:
        await gateway.until(lambda status: {one["state"] for one in status["replicas"]} == {"ready", "failed"})
        told = (
            "no replica is known to serve 'llama' (served here: qwen), but these have not told their models yet: "
            f"{down} is failed: "
        )
        answer = await gateway.chat([{"role": "user", "content": "x"}], model="llama")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_known")
        assert answer.json()["error"]["message"].startswith(told) and answer.headers["retry-after"] == "1"
        body = {"model": "llama", "messages": [{"role": "user", "content": "x"}]}
        for path in ("/explain", "/decide"):
            answer = await gateway.admin.post(path, json=body)
            assert answer.status_code == 503 and answer.json()["error"]["message"].startswith(told), path
        llama = start_engine("--served-model-name", "llama", "--port", str(unused_tcp_port)).wait()
        await gateway.ready(2)
        assert (await gateway.chat([{"role": "user", "content": "x"}], model="llama")).status_code == 200
        answer = await gateway.chat([{"role": "user", "content": "x"}], model="lama")
        assert answer.status_code == 404, "all have told theirs"
        llama.stop()


async def test_what_is_only_passed_on_waits_for_a_model_that_has_not_been_told(reranker, unused_tcp_port, start_engine):
    """One engine is ready and would refuse the other's requests for good."""
    down = f"127.0.0.1:{unused_tcp_port}"
    async with running("--replica-url", f"http://{down}", reranker) as gateway:
        await gateway.until(lambda status: {one["state"] for one in status["replicas"]} == {"ready", "failed"})
        body = {"model": "late", "query": "x", "documents": [PROSE]}
        for path in ("/v1/rerank", "/v1/score", "/classify", "/pooling"):
            # the long one is looked at in a thread
            answer = await gateway.client.post(
                path, json=body | {"documents": [PROSE] * (1 + 2000 * (path == "/pooling"))}
            )
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1", (path, answer.text)
            assert "these have not told their models yet" in answer.text
            assert (await gateway.client.post(path, json=body | {"model": "ranker"})).status_code == 200
        form = {"data": {"model": "late"}, "files": {"file": ("a.wav", b"\0" * 300_000)}}
        assert (await gateway.client.post("/v1/audio/transcriptions", **form)).status_code == 503
        for path in ("/decide", "/explain"):
            answer = await gateway.admin.post(path, params={"path": "/v1/rerank"}, json=body)
            assert answer.status_code == 503, answer.text
        late = start_engine("--served-model-name", "late", "--port", str(unused_tcp_port)).wait()
        await gateway.ready(2)
        answer = await gateway.client.post("/v1/rerank", json=body | {"model": "lat"})
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
        late.stop()


async def test_a_model_that_a_replicas_url_names_is_known_before_its_engine_answers(start_engine, unused_tcp_port):
    qwen, down = start_engine("--served-model-name", "qwen").wait(), f"127.0.0.1:{unused_tcp_port}"
    async with running("--workers", "2", "--replica-url", f"http://{down}#model=llama", qwen.url) as gateway:
        await gateway.until(lambda status: {one["state"] for one in status["replicas"]} == {"ready", "failed"})
        answer = await gateway.chat([{"role": "user", "content": "x"}], model="llama")
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["message"].startswith(f"no replica of 'llama' is ready ({down} is failed: ")
        ready = (await gateway.admin.get("/readyz")).json()["models"]  # qwen's tokenizer may still be loading
        assert ready.keys() == {"llama", "qwen"} and not ready["llama"]


async def test_a_prompt_that_names_no_model_is_refused_where_unlike_models_are_served(start_engine, other):
    long = start_engine("--served-model-name", "long", "--lora", "red").wait()
    short = start_engine("--model", other, "--served-model-name", "short").wait()
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    async with running("--replica-url", long.url, short.url) as gateway:
        await compared(gateway, 2)
        for nameless in (body, body | {"model": ""}, body | {"model": None}):
            answer = await gateway.client.post("/v1/chat/completions", json=nameless)
            assert (answer.status_code, answer.json()["error"]["message"], answer.json()["error"]["param"]) == (
                400, "name a model; served here: long, short", "model",
            ), answer.text  # fmt: skip
        answer = await gateway.client.post("/v1/messages", json=body)
        assert answer.status_code == 400 and answer.json()["type"] == "error", answer.text
        answer = await gateway.admin.post("/explain", json=body)
        assert answer.status_code == 400 and "name a model" in answer.text, answer.text
        long.process.kill()
        await gateway.until(lambda status: sum(one["state"] == "ready" for one in status["replicas"]) == 1)
        answer = await gateway.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400, answer.text


async def test_adapters_and_other_names_of_one_model_do_not_make_a_prompt_name_it(start_engine):
    one = start_engine("--served-model-name", "one", "--lora", "red").wait()
    same = start_engine("--served-model-name", "alias").wait()
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    async with running("--replica-url", one.url, same.url) as gateway:
        await compared(gateway, 2)
        answer = await gateway.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text


async def test_an_adapter_that_was_just_loaded_is_not_refused_for_another_models_context(start_engine, other):
    """Which model it belongs to is known only once the engines were asked again."""
    long = start_engine("--served-model-name", "long", "--max-model-len", "131072", "--num-blocks", "9000").wait()
    short = start_engine("--model", other, "--served-model-name", "short", "--max-model-len", "512").wait()
    more = start_engine("--model", other, "--served-model-name", "short", "--max-model-len", "512").wait()
    async with running("--replica-url", long.url, short.url, more.url) as gateway:
        await compared(gateway, 3)
        async with httpx.AsyncClient(base_url=long.url) as direct:
            loaded = await direct.post("/v1/load_lora_adapter", json={"lora_name": "new", "lora_path": "/adapters/new"})
            assert loaded.status_code == 200, loaded.text
        assert await held(gateway, "new", PROSE * 150) > 2000
        assert set((await gateway.status())["totals"]["prompts"]) == {"exact"}


async def test_an_engine_of_embeddings_is_not_told_to_report_cached_tokens(start_engine):
    """No answer of an embedding has a count of them, whatever the engine was started with."""
    engine = start_engine().wait()
    async with running("--replica-url", engine.url) as gateway:
        await compared(gateway, 1)
        for _ in range(200):
            answer = await gateway.client.post("/v1/embeddings", json={"model": "sim", "input": PROSE * 20})
            assert answer.status_code == 200, answer.text
            if int(answer.headers["x-hitherto-cached-tokens"]):
                break
        else:
            raise AssertionError("what is held is never predicted")
        (shown,) = (await gateway.status())["replicas"]
        assert not [problem for problem in shown["problems"] if "cached" in problem]


async def test_requests_without_a_prompt_to_route_are_not_counted_as_inexact_prompts(start_engine):
    """Nothing is amiss where a client wants tokens counted, or a model that does not exist."""
    async with running(
        "--replica-url", start_engine().wait().url, start_engine("--served-model-name", "more").wait().url
    ) as gateway:
        await compared(gateway, 2)
        assert (await gateway.client.post("/tokenize", json={"model": "sim", "prompt": PROSE})).status_code == 200
        assert (await gateway.chat([{"role": "user", "content": PROSE}], model="nobody")).status_code == 404
        assert (await gateway.chat([{"role": "user", "content": PROSE}])).status_code == 200
        assert (await gateway.status())["totals"]["prompts"] == {"exact": 1}


async def test_an_adopted_model_is_not_taken_for_the_one_that_is_launched(start_engine, other):
    """`--model` says what to launch; the adopted engine is ready long before, and has other files."""
    adopted = start_engine("--served-model-name", "adopted").wait()
    flags = "--launch", "1", "--profile", "sim", "--model", other
    async with running(*flags, "--replica-url", adopted.url) as gateway:
        await compared(gateway, 2)
        assert not [line for line in gateway.log if b"another tokenizer" in line]
        assert await held(gateway, "adopted", PROSE * 20) > 100
        assert await held(gateway, Path(other).name, PROSE * 20) > 100
        assert set((await gateway.status())["totals"]["prompts"]) == {"exact"}
