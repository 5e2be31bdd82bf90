"""The coordinator's own word on a microbatch that volunteers cannot compute, found by a process of its own.

It needs torch, the data and memory for one block. If this machine has none of that, volunteers' words are all
there is (docs/trust.md, "A sample that cannot be computed").
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys

from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.state.effects import BadSample, TryMicrobatch
from hetpeer.dht.base.runtime import dying_with_us

LONGEST_S = 120.0
"""Seconds after which a microbatch counts as one that this machine cannot try."""
NAMED = 8
"""Samples that are named; of the others only their number is."""

Samples = tuple[tuple[str, int], ...]
"""(shard, number of the sample in it)."""

_log = logging.getLogger(__name__)


class SampleTrials:
    """Computes microbatches of `run`, one after the other."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._plan = run.manifest.data_plan
        self._turn = asyncio.Lock()
        self._known: dict[Samples, BadSample] = {}
        """Samples of microbatches that could not be computed: later epochs need no process for them."""

    async def find(self, trial: TryMicrobatch, checkpoint: Record) -> BadSample | None:
        """The fault of the microbatch of `trial`; None: it has none, or this machine cannot try it."""
        samples = self._samples(trial)
        async with self._turn:
            if samples not in self._known:
                found = await self._try(trial, checkpoint)
                if found is None:
                    return None
                why, places = found
                where = named([samples[place] for place in places])
                self._known[samples] = BadSample(where, why)
        return self._known[samples]

    def _samples(self, trial: TryMicrobatch) -> Samples:
        pieces = self._plan.pieces(trial.batch, trial.id)
        return tuple((shard.name, int(sample)) for shard, piece in pieces for sample in piece.samples)

    async def _try(self, trial: TryMicrobatch, checkpoint: Record) -> tuple[str, list[int]] | None:
        """The finding of trial_process.py."""
        about = f"microbatch {trial.id} of batch {trial.batch}"
        _log.warning("volunteers cannot compute %s: it is tried here", about)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "hetpeer.bootstrap.service.trial_process"),
            *(str(self._run.path), str(trial.batch), str(trial.id)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            preexec_fn=dying_with_us(),
        )
        try:
            async with asyncio.timeout(LONGEST_S):
                out, said = await process.communicate(json.dumps(dict(checkpoint)).encode())
        except TimeoutError:
            _log.warning("%s takes too long here: volunteers decide", about)
            return None
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            last = (said.decode(errors="replace").strip().splitlines() or ["the process was killed"])[-1]
            _log.warning("%s cannot be tried here, so volunteers decide: %s", about, last)
            return None
        found: tuple[str, list[int]] | None = json.loads(out)
        return found


def named(samples: list[tuple[str, int]]) -> str:
    """`sample 3 of shard a`, or `samples 3, 5 of shard a, 2 of shard b`; NAMED samples at most."""
    shards: dict[str, list[str]] = {}
    for shard, sample in samples[:NAMED]:
        shards.setdefault(shard, []).append(str(sample))
    parts = ", ".join(f"{', '.join(numbers)} of shard {shard}" for shard, numbers in shards.items())
    more = f" and {len(samples) - NAMED} more" if len(samples) > NAMED else ""
    return f"sample{'' if len(samples) == 1 else 's'} {parts}{more}"
