"""Freed memory that malloc keeps goes back to the system when it is told to."""

import ctypes

import psutil

from hetpeer.stages.worker.freed_memory import give_back

PIECE, PIECES = 64 << 10, 1600


def resident() -> int:
    return psutil.Process().memory_info().rss


def test_free_pages_below_what_is_in_use_go_back() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    *pieces, last = [libc.malloc(PIECE) for _ in range(PIECES)]
    for piece in (*pieces, last):
        ctypes.memset(piece, 1, PIECE)
    for piece in pieces:
        libc.free(piece)
    kept = resident()
    give_back()
    assert kept - resident() > PIECE * PIECES * 3 // 4, "they lie below the last piece, which is in use"
    libc.free(last)
