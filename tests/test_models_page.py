"""docs/models.md: what the results of `make zoo` give, and what the project promises of them."""

import sys

import pytest

from benchmarks.zoo_page import LIBRARIES, PAGE, entries, kept_rows, page

LEAST = {"transformers": 150, "timm": 60}
"""Library → architectures that are tried."""
SHARE = 0.95
"""Part of them that works."""
LARGEST = 1e-4
"""Relative difference of a gradient from eager training, as `init` accepts it."""


def test_the_page_is_what_the_results_give() -> None:
    assert PAGE.read_text() == page(list(kept_rows().values())), "run python -m benchmarks.zoo NAME"


def test_every_model_of_the_tables_was_tried() -> None:
    assert list(kept_rows()) == list(entries())


@pytest.mark.parametrize("library", LIBRARIES)
def test_nearly_all_architectures_work(library: str) -> None:
    rows = [row for row in kept_rows().values() if row["family"] in LIBRARIES[library]]
    assert len({row["name"] for row in rows}) >= LEAST[library]
    assert sum(row["works"] for row in rows) >= SHARE * len(rows)


def test_every_mixture_of_experts_works() -> None:
    rows = kept_rows().values()
    experts = [row for row in rows if row["family"] == "mixtures of experts" or "moe" in row["name"]]
    assert len(experts) > 20
    assert [row["name"] for row in experts if not row["works"]] == []


def test_what_works_differs_by_rounding_alone() -> None:
    working = [row for row in kept_rows().values() if row["works"]]
    assert {row["name"]: row["gradient"] for row in working if not row["gradient"] <= LARGEST} == {}
    assert {row["name"]: row["loss"] for row in working if not row["loss"] <= LARGEST} == {}


def test_a_library_that_cannot_be_imported_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import zoo

    monkeypatch.setitem(sys.modules, "timm", None)
    assert list(zoo.usable(list(entries()))) == ["transformers"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("timm cannot be imported (ModuleNotFoundError")
    assert "its models keep their last results; install timm and torchvision and torch" in line
