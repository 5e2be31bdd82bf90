"""Backups: volunteers that keep a place, take part in no step, and step in for the last holder of a block.

Pure. `Membership.backups` names them. What they fetch is decided in coordinator/backup_fetches.py, when they
step in at the step barrier. Docs: planning.md, "Backups".
"""

from __future__ import annotations

from collections.abc import Collection

from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import Effect
from hetpeer.bootstrap.state.membership import Membership
from hetpeer.bootstrap.state.volunteer_state import VolunteerState


def kept(members: Membership, version: int) -> set[int]:
    """Blocks of which a backup holds `version`."""
    backups = [v for v in members.volunteers.values() if v.peer in members.backups and v.has(version)]
    return {block for backup in backups for block in range(*(backup.place or (0, 0)))}


def standing_by(members: Membership, version: int) -> set[int]:
    """Blocks of which a backup has the checkpoint of `version`, in its worker or on its disk."""
    backups = [v for v in members.volunteers.values() if v.peer in members.backups and v.place is not None]
    ready = [v.place for v in backups if v.place and (v.has(version) or v.copied == (v.place, version))]
    return {block for place in ready for block in range(*place)}


def needed_backups(members: Membership, version: int) -> list[VolunteerState]:
    """Backups without which a block has no volunteer: one for each, rather one that has `version`."""
    present = [v for v in members.volunteers.values() if v.place is not None and not v.slow]
    others = {v.peer: v.place for v in present if v.place is not None and v.peer not in members.backups}
    needed, found = set(members.uncovered(others)), list[VolunteerState]()
    backups = [v for v in present if v.peer in members.backups]
    for backup in sorted(backups, key=lambda v: (not v.has(version), v.peer)):
        blocks = set(range(*(backup.place or (0, 0))))
        if not needed.isdisjoint(blocks):
            found.append(backup)
            needed -= blocks
    return found


def note_backups(
    context: CoordinatorContext, backups: Collection[str], *, steps_in: Collection[str] = ()
) -> list[Effect]:
    """Make these the backups of the run, and log that; `steps_in`: those that work from now on.

    Peers that are not here are forgotten: none of them holds anything that is worth a place.
    """
    members = context.members
    present = frozenset(backups) & members.volunteers.keys()
    if present == members.backups and not steps_in:
        return []
    members.backups = present
    return [context.log(kind="backups", peers=sorted(present), steps_in=sorted(steps_in))]
