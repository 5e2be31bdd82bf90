"""Imports that every process of the zoo needs, done once in the server that forks them."""

import transformers  # noqa: F401

import hetpeer.bootstrap.authoring.equivalence
import hetpeer.stages.tracing.trace  # noqa: F401
