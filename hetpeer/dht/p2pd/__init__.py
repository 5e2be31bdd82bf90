"""The libp2p process p2pd: start, supervision, requests, incoming streams, TCP probes."""
