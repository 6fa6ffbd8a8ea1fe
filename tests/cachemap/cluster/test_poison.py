"""Whatever befalls one key of the shared map costs its replica a few seconds of sharing, and the others nothing."""

from tests.poison import poisons

from ..publisher import publishing
from .gateways import event, gateways, prompt, until
from .test_shared import told

KEYS = ("newest", "lease", "head", "deltas", "snapshot", "request")


def role_pair(one, other, name):
    return {one.role(name), other.role(name)}


async def test_every_poison_at_every_key_is_healed_and_no_other_replica_notices(start_redis, redis_binary):
    server = start_redis(binary=redis_binary)
    async with publishing() as publisher, publishing() as quiet, gateways(server.url, 2) as (one, other):
        with server.client() as client:
            ill = {}  # a replica for each poison at each key; all of them hear one publisher
            for gateway in (one, other):
                gateway.follow("model:1", publisher)
                gateway.follow("well:1", quiet)
            await until(
                lambda: role_pair(one, other, "model:1") == role_pair(one, other, "well:1") == {"leader", "follower"}
            )
            await publisher.publish(event(1, 0, 6))
            await until(lambda: one.held("model:1", prompt(1, 6)[1]) == other.held("model:1", prompt(1, 6)[1]) == 6)
            for kind in KEYS:
                key = getattr(one.intakes["model:1"].keys, kind).encode()
                if kind == "request":
                    client.set(key, 1)
                ill |= {f"{kind}-{number}:1": (kind, number) for number, _ in enumerate(poisons(client, key))}
            assert len(ill) > 60
            for name in ill:
                for gateway in (one, other):
                    gateway.follow(name, publisher)
            await until(lambda: all(role_pair(one, other, name) == {"leader", "follower"} for name in ill), 20)
            await publisher.publish(event(2, 0, 6))
            await until(
                lambda: all(gateway.held(name, prompt(2, 6)[1]) == 6 for gateway in (one, other) for name in ill), 20
            )
            roles = one.role("well:1"), other.role("well:1")
            for name, (kind, number) in ill.items():
                key = getattr(one.intakes[name].keys, kind).encode()
                if kind == "request":
                    client.set(key, 1)
                what, apply = list(poisons(client, key))[number]
                ill[name] = f"{kind} {what}"
                apply()
            await quiet.publish(event(3, 0, 6))
            await until(lambda: one.held("well:1", prompt(3, 6)[1]) == other.held("well:1", prompt(3, 6)[1]) == 6, 1)

            def healed(name):
                return role_pair(one, other, name) == {"leader", "follower"} and one.contents(name) == other.contents(
                    name
                )

            for _ in range(2):  # each has looked at its leases; one look was perhaps on its way
                heard = [gateway.intakes["well:1"].led_at for gateway in (one, other)]
                await until(
                    lambda: all(
                        gateway.intakes["well:1"].led_at > at for gateway, at in zip((one, other), heard, strict=True)
                    )
                )
            await publisher.publish(event(4, 0, 6))
            await until(
                lambda: all(healed(name) and one.held(name, prompt(4, 6)[1]) == 6 for name in ill), 20,
                lambda: [(what, told(one, name), told(other, name), one.intakes[name].role_reason, other.intakes[name].role_reason)
                         for name, what in ill.items() if not healed(name)],
            )  # fmt: skip
            async with gateways(server.url) as (late,):  # and what lies there is right
                for name in ill:
                    late.follow(name, publisher)
                await until(lambda: all(late.role(name) == "follower" and late.contents(name) == one.contents(name) for name in ill), 15,
                            lambda: [(what, told(one, name), told(late, name))
                                     for name, what in ill.items() if late.contents(name) != one.contents(name)])  # fmt: skip
            assert (one.role("well:1"), other.role("well:1")) == roles
            assert not one.shared.background.recent() and not other.shared.background.recent()
