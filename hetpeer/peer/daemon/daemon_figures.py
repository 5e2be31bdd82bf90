"""Progress of a volunteer for its owner: the run, and this volunteer's part in it."""

from __future__ import annotations

import os
import time

from hetpeer.peer.control.control_messages import LinkStatus, VolunteerStatus
from hetpeer.peer.daemon.presence import Presence
from hetpeer.peer.training.self_advert import link_notes
from hetpeer.stages.pipeline.utilization import WorkerOccupation


def figures_of(presence: Presence) -> VolunteerStatus:
    """Current progress; without a living volunteer only that of the run."""
    manifest, volunteer = presence.files.run.manifest, presence.life.volunteer
    known = VolunteerStatus(
        pid=os.getpid(), run=manifest.name[:64], unit=manifest.data.unit, steps=manifest.training.steps
    )
    if volunteer is None:
        return known
    member, figures = volunteer.member, volunteer.figures
    notes = link_notes(volunteer.links.links, presence.node.path)
    at_work = {
        "step": member.version or 0,
        "loss": member.loss,
        "blocks": member.place,
        "units_per_second": volunteer.tokens_per_second,
        "microbatches": figures.microbatches,
        "computes": figures.shares.lately(time.monotonic())[WorkerOccupation.COMPUTES],
        "lines": tuple(
            LinkStatus(to=note.to, way=note.path, bytes_per_second=float(note.rate)) for note in notes
        ),
    }
    return known.model_copy(update=at_work)
