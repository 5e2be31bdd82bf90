"""The tiny run and its swarm, as the tests of honest swarms have them."""

from tests.swarm.conftest import server, shared, swarm, template

__all__ = ["server", "shared", "swarm", "template"]
