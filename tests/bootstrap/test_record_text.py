"""Decisions of the log in plain words."""

from typing import Any

import pytest

from hetpeer.bootstrap.log.record_text import TOLD, record_text

ADA, BOB = "Qm" + "a" * 38 + "x9fQ2a", "Qm" + "b" * 38 + "K7bobb"


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (
            {
                "kind": "rollback",
                "term": 2,
                "view": 2,
                "to_version": 40,
                "why": "no holder is left of block 7",
            },
            "back to step 40: no holder is left of block 7; 7 steps are computed again",
        ),
        (
            {"kind": "rollback", "term": 2, "view": 2, "to_version": 46, "why": "it is slow"},
            "back to step 46: it is slow; 1 step is computed again",
        ),
        (
            {"kind": "rollback", "term": 2, "view": 2, "to_version": 47, "why": f"{ADA} is in question"},
            "back to step 47: …x9fQ2a is in question",
        ),
        ({"kind": "gone", "peer": ADA, "why": "said farewell"}, "volunteer …x9fQ2a left"),
        (
            {"kind": "gone", "peer": ADA, "why": "lease expired"},
            "volunteer …x9fQ2a is lost: nothing was heard of it for too long",
        ),
        (
            {"kind": "gone", "peer": ADA, "why": "out of memory", "cluster": 3},
            "cluster 3: volunteer …x9fQ2a is lost: out of memory",
        ),
        (
            {"kind": "planned", "id": "ab12", "layouts": [[[0, 4], [4, 7]], [[0, 7]]], "plan": {}},
            "plan ab12 is in force, with 3 places, by pipeline: 0-3, 4-6; 0-6",
        ),
        (
            {"kind": "arranged", "layouts": [[[0, 4], [4, 7]], [[0, 6], [6, 7]]]},
            "the blocks are divided anew, by pipeline: 0-3, 4-6; 0-5, 6",
        ),
        (
            {"kind": "moved", "after_s": 6.04, "moving_s": 45.2, "why": ""},
            "the move of blocks took 45 s; a step takes 6.0 s now",
        ),
        (
            {"kind": "moved", "after_s": None, "moving_s": 45.2, "why": "others took part"},
            "the move of blocks took 45 s, and cannot be judged: others took part",
        ),
        (
            {"kind": "moved", "after_s": None, "moving_s": None, "why": "the run went back"},
            "the move of blocks cannot be judged: the run went back",
        ),
        (
            {"kind": "banned", "peer": BOB, "why": "it lied", "step": 3},
            "volunteer …K7bobb is banned: it lied",
        ),
        (
            {"kind": "dispute", "peers": [ADA, BOB], "step": 5, "checked": ADA, "checkers": [BOB]},
            "volunteers …x9fQ2a and …K7bobb report different results for step 5",
        ),
        (
            {"kind": "quarrel", "step": 5, "pairs": [[ADA, BOB]], "of": 3, "why": "one waits for the other"},
            (
                "volunteers who cannot add up together: …x9fQ2a and …K7bobb and 2 more pairs (one waits for "
                "the other)"
            ),
        ),
    ],
)
def test_a_record_in_words(record: dict[str, Any], text: str) -> None:
    assert record["kind"] in TOLD
    assert record_text(record, 47) == text


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (
            {"kind": "rollback", "term": 2, "view": 2, "to_version": 40, "why": "it is slow"},
            "cluster 0: back to step 40: it is slow",
        ),
        (
            {"kind": "rollback", "term": 2, "view": 2, "to_version": 40, "why": "it is slow", "cluster": 1},
            "cluster 1: back to step 40: it is slow",
        ),
        ({"kind": "gone", "peer": ADA, "why": "said farewell"}, "cluster 0: volunteer …x9fQ2a left"),
        ({"kind": "banned", "peer": BOB, "why": "it lied"}, "volunteer …K7bobb is banned: it lied"),
        ({"kind": "founded", "cluster": 0, "version": 0}, "cluster 0 begins"),
        ({"kind": "founded", "cluster": 2, "version": 8}, "cluster 2 begins from the last checkpoint"),
        (
            {"kind": "dissolved", "cluster": 0, "why": "no holder is left of block 7"},
            "cluster 0 falls apart: no holder is left of block 7",
        ),
    ],
)
def test_a_record_of_a_grouped_run_names_its_cluster(record: dict[str, Any], text: str) -> None:
    assert record["kind"] in TOLD
    assert record_text(record, grouped=True) == text
