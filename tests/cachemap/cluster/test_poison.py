"""Whatever befalls one key of the shared map costs its replica a few seconds of sharing, and the others nothing."""

from tests.poison import poisons

from ..publisher import publishing
from .gateways import event, followed, gateways, healed, hold, is_shared, report, same, share, until

KEYS = ("newest", "lease", "head", "deltas", "snapshot", "request")


async def test_every_poison_at_every_key_is_healed_and_no_other_replica_notices(start_redis, redis_binary):
    server = start_redis(binary=redis_binary)
    async with publishing() as publisher, publishing() as quiet, gateways(server.url, 2) as (one, other):
        with server.client() as client:
            await share(quiet, one, other, name="well:1")
            await share(publisher, one, other, name="model:1")
            await report(publisher, 1, one, other, name="model:1")

            def poisoned(name, kind):
                """Return what can befall a replica's key of a kind."""
                key = getattr(one.intakes[name].keys, kind).encode()
                if kind == "request":
                    client.set(key, 1)
                return list(poisons(client, key))

            # A replica for each poison at each key; all of them hear one publisher.
            ill = {f"{kind}-{n}:1": (kind, n) for kind in KEYS for n, _ in enumerate(poisoned("model:1", kind))}
            assert len(ill) > 60
            for name in ill:
                for gateway in (one, other):
                    gateway.follow(name, publisher)
            await until(lambda: all(is_shared(one, other, name) for name in ill), 60)
            await publisher.publish(event(2, 0, 6))
            for name in ill:
                await hold(2, 6, one, other, name=name)
            roles = one.role("well:1"), other.role("well:1")
            for name, (kind, number) in ill.items():
                _, apply = poisoned(name, kind)[number]
                apply()
            await quiet.publish(event(3, 0, 6))
            await hold(3, 6, one, other, name="well:1", seconds=1)
            for _ in range(2):  # each has looked at its leases; one look was perhaps on its way
                wells = [gateway.intakes["well:1"] for gateway in (one, other)]
                heard = [well.led_at for well in wells]
                await until(lambda: all(well.led_at > at for well, at in zip(wells, heard, strict=True)))
            await publisher.publish(event(4, 0, 6))
            async with gateways(server.url) as (late,):  # and what lies there is right
                for name in ill:
                    await hold(4, 6, one, other, name=name)
                    await healed(one, other, name)
                    late.follow(name, publisher)
                for name in ill:
                    await followed(late, name)
                    await same(one, late, name)
            assert (one.role("well:1"), other.role("well:1")) == roles
            assert not one.shared.background.recent() and not other.shared.background.recent()
