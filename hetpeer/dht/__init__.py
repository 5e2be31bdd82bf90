from hetpeer.dht.base import lean_hivemind

lean_hivemind.install()
