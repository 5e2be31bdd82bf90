"""The tiny run and its swarm, as the tests of honest swarms have them."""

from tests.swarm.conftest import shared, swarm, template

__all__ = ["shared", "swarm", "template"]
