"""The tiny run and its swarm, as the tests of honest swarms have them."""

from tests.swarm.conftest import reference, server, shared, swarm, template

__all__ = ["reference", "server", "shared", "swarm", "template"]
