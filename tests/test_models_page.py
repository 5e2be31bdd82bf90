"""docs/models.md is what the tables and the results of `make zoo` give."""

from benchmarks.zoo_page import PAGE, kept_rows, page


def test_the_page_is_what_the_results_give():
    assert PAGE.read_text() == page(list(kept_rows().values())), "run python -m benchmarks.zoo NAME"
