"""The tables in the pages are those of the committed results."""

from __future__ import annotations

import json
from pathlib import Path

import compare
import make_report
import pytest
import tables

FILES = dict.fromkeys(make_report.RESULTS / file for file, _ in tables.TABLES.values())
COMMITTED = [file for file in FILES if file.is_file()]


@pytest.mark.parametrize("page", make_report.PAGES, ids=lambda page: page.parent.name)
def test_pages_show_the_committed_results(page: Path) -> None:
    text = page.read_text()
    assert make_report.BLOCK.search(text), "the page has no block"
    assert make_report.rendered(text) == text, "run `make bench-report`"


def test_every_table_stands_on_a_page() -> None:
    text = "".join(page.read_text() for page in make_report.PAGES)
    assert {match["name"] for match in make_report.BLOCK.finditer(text)} == set(tables.TABLES)


def test_a_changed_result_changes_the_page(tmp_path: Path) -> None:
    file = tables.TABLES["grpo_step"][0]
    result = json.loads((make_report.RESULTS / file).read_text())
    result["workloads"]["tiny"]["ratio"]["generation"] = 0.123
    (tmp_path / file).write_text(json.dumps(result))
    page = "Before.\n<!-- made by make_report.py: grpo_step -->\nstale\n<!-- end -->\nAfter.\n"
    made = make_report.rendered(page, tmp_path)
    assert "| 0.12 |" in made and "stale" not in made
    assert made.startswith("Before.") and made.endswith("<!-- end -->\nAfter.\n")
    assert make_report.rendered(made, tmp_path) == made
    (tmp_path / file).unlink()
    assert f"`results/{file}` is not there yet" in make_report.rendered(made, tmp_path)


def test_no_path_of_a_machine_is_in_the_results() -> None:
    for file in COMMITTED:
        command = json.loads(file.read_text())["command"]
        assert " /" not in command and "benchmarking/" in command


def test_plots_of_all_results_are_small() -> None:
    for file in COMMITTED:
        assert 2_000 < file.with_suffix(".png").stat().st_size < 100_000


def test_a_side_that_did_not_fit_says_so() -> None:
    sides = {
        "agilerl": {"memory_bytes": {"added": 5_000_000}, "median_seconds": 0.25},
        "plain": {"skipped": "12 GB were not free"},
    }
    case = {"settings": {"vocab_size": 8192, "tokens": 256}, "sides": sides}
    made = tables.logprob_memory({"workloads": {"8192 x 256": case}})
    assert made.endswith("| 8,192 × 256 | 5 MB, 0.25 s | 12 GB were not free |")


def test_results_are_compared_by_their_ratios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tables.TABLES["grpo_step"][0]
    result = json.loads((make_report.RESULTS / file).read_text())
    monkeypatch.setattr("sys.argv", ["compare.py", str(tmp_path)])

    def exit_code() -> object:
        (tmp_path / file).write_text(json.dumps(result))
        with pytest.raises(SystemExit) as end:
            compare.main()
        return end.value.code

    assert exit_code() == 0
    result["workloads"]["tiny"]["ratio"]["generation"] *= 1.2
    assert exit_code() == 1
    assert f"{file}: tiny.generation" in capsys.readouterr().out
    result["workloads"].clear()
    assert exit_code() == 1
