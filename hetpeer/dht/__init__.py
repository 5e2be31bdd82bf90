from hetpeer.dht import lean

lean.install()
