"""Places in nameless files: within a limit that several files share, and on the disk if reserved."""

import errno
import os
import random

import pytest

from hetpeer.dht.base.file_pieces import read
from hetpeer.stages.ipc.nameless_file import ALIGNMENT, DiskShare, NamelessFile

SIZE = 3 * ALIGNMENT


def blocks_of(file):
    """Bytes that the disk has given to the file."""
    return 512 * os.fstat(file.file.descriptor).st_blocks


def test_two_files_share_a_limit(tmp_path):
    share = DiskShare(2 * SIZE)
    one, other = NamelessFile(tmp_path, share), NamelessFile(tmp_path, share)
    places = [one.take(SIZE), other.take(SIZE - 1)]
    for file in (one, other):
        with pytest.raises(OSError, match="the limit of 0 MiB is reached") as caught:
            file.take(1)
        assert caught.value.errno == errno.EDQUOT
    one.give(places[0])
    other.give(other.take(SIZE))
    other.give(places[1])
    assert (share.used, one.used, other.used) == (0, 0, 0)
    assert list(tmp_path.iterdir()) == []


def test_what_is_reserved_is_on_the_disk_and_counts(tmp_path):
    share = DiskShare(4 * SIZE)
    file = NamelessFile(tmp_path, share)
    file.reserve(3 * SIZE)
    assert blocks_of(file) >= share.used == 3 * SIZE
    places = [file.take(SIZE) for _ in range(4)]
    assert share.used == 4 * SIZE
    for place in places:
        file.give(place)
    assert blocks_of(file) >= share.used == file.file.nbytes == 3 * SIZE
    with pytest.raises(OSError, match="the limit"):
        file.reserve(5 * SIZE)
    assert share.used == 3 * SIZE
    file.reserve(SIZE)
    assert share.used == file.file.nbytes == SIZE
    file.close()
    assert share.used == 0


def test_a_reader_keeps_a_closed_file_and_nobody_gets_a_new_place(tmp_path):
    file = NamelessFile(tmp_path, DiskShare(SIZE))
    place = file.take(5)
    part = file.part(place)
    part.write(0, b"state")
    file.close()
    assert bytes(read(part, 0, 5)) == b"state"
    file.give(place)
    with pytest.raises(OSError, match="closed"):
        file.take(5)
    with pytest.raises(OSError, match="closed"):
        file.part(place)


def test_places_never_overlap_and_the_file_is_no_longer_than_they_need(tmp_path):
    chance = random.Random(3)
    share = DiskShare(40 * ALIGNMENT)
    file = NamelessFile(tmp_path, share)
    held = []
    for _ in range(400):
        if held and chance.random() < 0.5:
            place, mark = held.pop(chance.randrange(len(held)))
            assert bytes(read(file.part(place), 0, place.nbytes)) == mark * place.nbytes
            file.give(place)
        else:
            try:
                place = file.take(chance.randrange(4 * ALIGNMENT))
            except OSError:
                continue
            mark = bytes([chance.randrange(256)])
            file.part(place).write(0, mark * place.nbytes)
            held.append((place, mark))
        end = max((place.offset + place.nbytes for place, _ in held), default=0)
        assert file.file.nbytes <= share.used <= end + ALIGNMENT
        assert share.used <= share.limit
