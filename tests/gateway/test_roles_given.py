"""Roles however they are given, side by side."""

import json

import httpx

from .running import running
from .test_legs import TEXT, asked, words


async def test_roles_by_profile_by_url_and_by_post_stand_side_by_side(start_engine, tmp_path):
    by_url, by_post, single = [one.wait() for one in (start_engine("--kv-connector"), start_engine("--kv-connector"), start_engine())]  # fmt: skip
    profile = tmp_path / "prompts.yaml"
    profile.write_text("engine: sim\nkv_connector: true\nrole: prefill\n")
    pools = json.dumps({"prompts": {"profile": str(profile), "launch": 1}})
    async with running("--pools", pools, "--replica-url", f"{by_url.url}#role=decode", "--policy", "round_robin") as gateway:  # fmt: skip
        await gateway.ready(2)
        added = await gateway.admin.post("/replicas", json={"url": by_post.url, "role": "decode"})
        assert added.status_code < 300, added.text
        await gateway.ready(3)
        roles = {one["url"]: (one["role"], one["managed"]) for one in (await gateway.status())["replicas"]}
        assert roles.pop(by_url.url) == roles.pop(by_post.url) == ("decode", False)
        [launched] = roles.values()
        assert launched == ("prefill", True)
        answered = set()
        async with httpx.AsyncClient(base_url=single.url) as alone:
            for number in range(4):
                path, body = asked("chat", f"Side by side {number}. " + TEXT * 20, False)
                answer = await gateway.client.post(path, json=body)
                assert words(answer) == words(await alone.post(path, json=body))
                answered.add(answer.headers["x-hitherto-replica"])
        assert answered == {f"127.0.0.1:{one.port}" for one in (by_url, by_post)}
        legs = (await gateway.status())["legs"]
        assert (legs["apart"], legs["decode"]) == (4, {"complete": 4})
