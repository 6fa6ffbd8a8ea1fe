"""Several models behind one gateway, each exact: a gateway process before simulated engines of unlike models and
variants."""

import json
import shutil
from pathlib import Path

import httpx
import pytest

from replicas.simulated.model import sim_model_dir

from .running import counted, predicted, reported, running

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
    return predicted(reply), reported(reply)


async def held(gateway, model: str, text: str) -> int:
    """Ask until the prompt's blocks were reported by events; how many tokens of it are held. Nothing is ever predicted
    too high."""
    for _ in range(200):
        foreseen, told = await ask(gateway, model, text)
        assert foreseen <= told
        if 0 < foreseen == told:
            return foreseen
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
        assert log.count(b"model c has 2 variants") == 1


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
                assert predicted(reply) <= reported(reply)
                if 0 < predicted(reply) == reported(reply):
                    found[reply.headers["x-hitherto-replica"]] = predicted(reply)
                if len(found) == count:
                    return found
            raise AssertionError(f"what is held is never predicted: {found}")

        held = await each(2)
        assert b"no files here" not in b"".join(gateway.log), "they were only looked for"
        assert sorted(one["block_size"] for one in (await gateway.status())["spaces"]) == [16, 32]
        log = b"".join(gateway.log)
        assert b"have block size 32 instead of 16" in log or b"have block size 16 instead of 32" in log
        template = folder / "chat_template.jinja"
        template.write_text("Be brief. Be clear. Be kind, and say nothing that is not so. " + template.read_text())
        port = first.port
        first.stop()
        again = start_engine(*flags, "--port", str(port)).wait()
        await gateway.until(lambda _: any(b" files in " in line for line in gateway.log))
        await compared(gateway, 2)
        assert again.port == port
        anew = await each(2)
        assert anew[f"127.0.0.1:{port}"] > held[f"127.0.0.1:{port}"]
        page = (await gateway.admin.get("/metrics")).text
        assert counted(page, "hitherto_predictions_total", outcome="over") == 0
        assert set((await gateway.status())["totals"]["prompts"]) == {"exact"}


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
