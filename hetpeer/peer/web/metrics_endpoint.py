"""`/metrics`: the daemon's metrics in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


def metrics_route(look: Callable[[], Iterable[Metric]]) -> Route:
    """Route of `/metrics`; `look` is called on the loop for each request."""
    registry = CollectorRegistry()
    registry.register(_Looking(look))

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=content_type)

    return Route("/metrics", metrics)


class _Looking(Collector):
    def __init__(self, look: Callable[[], Iterable[Metric]]) -> None:
        self._look = look

    def collect(self) -> Iterable[Metric]:
        return self._look()
