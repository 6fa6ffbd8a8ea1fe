"""What the status page shows in a real browser."""

import asyncio
import tempfile

import pytest

from gateway.ops.admin import Admin
from gateway.ops.guard import Guard

from .test_admin import Gateway
from .test_guard import BROWSER, TOKEN


@pytest.mark.skipif(not BROWSER, reason="there is no Chromium (Debian: apt-get install chromium)")
async def test_it_says_what_is_amiss_with_redis_also_when_opened_with_the_token_in_its_address():
    gateway = Gateway()
    gateway.fleet.add("http://a:1")
    status = gateway.status()
    status["map"]["redis"] = {"trouble": "a lease: READONLY", "ledger_joined": False, "ledger_reason": "NOPERM"}
    status["replicas"][0] |= {"map_role": "alone", "map_role_reason": "no gateway leads"}
    status["background_failures"] = {"publish": {"failures": 3, "last": "KeyError: 7", "seconds_ago": 2.0}}
    gateway.status = lambda: status
    admin = Admin(gateway, Guard((), TOKEN))
    port = await admin.start("127.0.0.1", 0)
    try:
        with tempfile.TemporaryDirectory(prefix="chromium-") as profile:
            browser = await asyncio.create_subprocess_exec(
                BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}",
                "--virtual-time-budget=1500", "--dump-dom", f"http://any:{TOKEN}@localhost:{port}/",
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            try:
                page = (await asyncio.wait_for(browser.communicate(), 60))[0].decode()
            finally:
                if browser.returncode is None:
                    browser.kill()
                    await browser.wait()
    finally:
        await admin.stop()
    shown = page.partition("<script>")[0]
    assert "has not answered" not in shown, "fetch() refuses an address with credentials"
    for whose, what in (
        ("map shared through Redis", "a lease: READONLY"),
        ("load shared through Redis", "this gateway counts alone: NOPERM"),
        ("a:1", "its part of the map is not shared: no gateway leads"),
        ("background work", "publish failed 3 times, 2 s ago with KeyError: 7"),
    ):
        assert f"<b>{whose}</b>{what}" in shown
