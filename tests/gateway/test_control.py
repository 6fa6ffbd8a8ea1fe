"""The control of overload with real sockets: what lower classes give, get back, and what premium keeps."""

from contextlib import asynccontextmanager

import yaml

from .running import running
from .test_admission import SETTINGS, ask, engines, flood

WINDOW = 2.0


@asynccontextmanager
async def gateway(tmp_path, urls, premium, window=WINDOW):
    settings = yaml.safe_load(SETTINGS)
    settings["admission"] = {"control_window": f"{window:g}s"}
    settings["scheduler"]["qos_classes"][0] |= premium
    (tmp_path / "hitherto.yaml").write_text(yaml.safe_dump(settings))
    async with running("--config", str(tmp_path / "hitherto.yaml"), "--replica-url", *urls) as one:
        await one.ready(len(urls))
        yield one


def events(status):
    return [event for event in status["control"]["events"] if event["class"]]


def told(status):
    return [(event["step"], event["class"], event["taken"]) for event in events(status)]


def windows(events):
    """Those of each window together: they are told of at once."""
    found = [[events[0]]]
    for event in events[1:]:
        if event["at"] - found[-1][-1]["at"] < WINDOW / 4:
            found[-1].append(event)
        else:
            found.append([event])
    return [[(event["step"], event["class"]) for event in one] for one in found]


async def test_what_is_taken_from_lower_classes_is_told_and_given_back_in_reverse_order(tmp_path):
    """A limit that nobody can keep, of requests that are sent all the same: the pressure lasts as long as they do."""
    with engines(2) as (urls, _):
        impossible = {"slo": {"ttft": "1ms"}, "when_full": "observe"}
        async with gateway(tmp_path, urls, impossible) as one:
            async with flood(one, 30, tier="premium") as premium:
                await one.until(lambda status: ("shed", "free", True) in told(status))
                status = await one.status()
                assert told(status)[:4] == [(step, "free", True) for step in ("tighten", "cap", "halve", "shed")]
                assert status["control"]["models"][0]["wants_more"] and status["control"]["models"][0]["level"] >= 4
                assert await one.counted("hitherto_more_replicas_wanted", model="sim") == 1
                assert await one.counted("hitherto_control_steps_total", step="shed", change="taken") >= 1
                refused = await ask(one)
                while refused[0] != 429:  # a window of a busy machine gave some of it back
                    refused = await ask(one)
                assert int(refused[1]) >= 1 and refused[2] == "overloaded"
            assert {answer[0] for answer in premium} == {200}
            status = await one.until(lambda status: status["control"]["models"][0]["level"] == 0)
            assert not status["control"]["models"][0]["wants_more"]
            held, descent, shed = [], [], 0
            for event in events(status):
                if event["taken"]:
                    held.append((event["step"], event["class"]))
                    descent, shed = [], [step for step, _ in held].count("shed")
                else:
                    assert held.pop() == (event["step"], event["class"]), "in reverse order"
                    descent.append(event)
            assert not held and descent
            if shed:
                *before, last = windows(descent)
                assert len(before) == shed and before[-1][-1] == ("shed", "free")
                assert last == [(step, "free") for step in ("halve", "cap", "tighten")]
            assert (await ask(one))[0] == 200
            shown = [entry["text"] for entry in (await one.admin.get("/recent")).json()["journal"]]
            assert {event["text"] for event in status["control"]["events"]} <= {*shown}, "lines of the live page"
