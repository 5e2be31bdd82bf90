"""The advert of a reliable peer in the DHT."""

from __future__ import annotations

from hetpeer.bootstrap.service.driver import CoordinatorService
from hetpeer.bootstrap.state.effects import CoordinatorState
from hetpeer.dht.discovery import Advert
from hetpeer.dht.node.node import Node
from hetpeer.peer.training.self_advert import reach_fields


def notable_of_reliable(service: CoordinatorService | None) -> object:
    """Facts whose change is published at once: who coordinates, committed steps, whether the run trains."""
    if service is None:
        return None
    state = service.core.state
    return service.core.done, CoordinatorState.TRAINING if state is CoordinatorState.REDUCING else state


def reliable_advert(service: CoordinatorService | None, node: Node) -> Advert:
    """Progress of the run if this peer coordinates it; otherwise only that it is there."""
    if service is None:
        return Advert(
            addresses=tuple(node.addresses()[:8]), role="reliable", state="following", **reach_fields(node)
        )
    last = [float(commit["loss"]) for commit in service.core.last]
    return Advert(
        addresses=tuple(node.addresses()[:8]),
        role="coordinator",
        state=service.core.state.value,
        step=service.core.done,
        loss=sum(last) / len(last) if last else None,
        tokens_per_second=service.tokens_per_second(),
        **reach_fields(node),
    )
