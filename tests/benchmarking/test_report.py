"""The tables in the pages are those of the committed results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import compare
import figures
import make_report
import plots
import pytest
import tables

FILES = dict.fromkeys(make_report.RESULTS / file for file, _ in tables.TABLES.values())
COMMITTED = [file for file in FILES if file.is_file()]
Capture = pytest.CaptureFixture[str]


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
    for stem in plots.PLOTS:
        assert 2_000 < (make_report.RESULTS / f"{stem}.png").stat().st_size < 100_000


def test_a_side_that_did_not_fit_says_so() -> None:
    sides = {
        "agilerl": {"memory_bytes": {"added": 5_000_000}, "median_seconds": 0.25},
        "plain": {"skipped": "12 GB were not free"},
    }
    case = {"settings": {"vocab_size": 8192, "tokens": 256}, "sides": sides}
    made = tables.logprob_memory({"workloads": {"8192 x 256": case}})
    assert made.endswith("| 8,192 × 256 | 5 MB, 0.25 s | 12 GB were not free |")


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.stem)
def test_every_ratio_and_share_of_a_table_is_compared(file: Path) -> None:
    result = json.loads(file.read_text())
    if file.stem == "token-cost-cpu":  # the arithmetic follows from the settings
        for found in result["workloads"].values():
            for cost in found["factors"].values():
                cost["relative_to_1x"]["arithmetic_per_token"] = 1.0
    parts = {part for name, parts in tables.TABLES.values() if name == file.name for part in parts}
    text = "".join(part(result) for part in parts - {tables.machine, tables.provenance})
    shown = re.findall(r"(?<![\d.])(?:\d+\.\d\d(?! s)|\d+%)", text)
    compared = {"1.00"}  # of a case to itself
    for found in result["workloads"].values():
        some = figures.FIGURES[file.name](found)
        compared |= {f"{ratio:.2f}" for ratio in some.ratios.values()}
        compared |= {f"{share:.0%}" for share in some.shares.values()}
    assert set(shown) <= compared


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.stem)
def test_no_figure_is_compared_that_is_1_by_definition(file: Path) -> None:
    for found in json.loads(file.read_text())["workloads"].values():
        assert 1.0 not in figures.FIGURES[file.name](found).ratios.values()


class Folders:
    """Two folders of results, and what comparing them gives."""

    def __init__(self, root: Path) -> None:
        self.old, self.new = root / "old", root / "new"
        self.old.mkdir()
        self.new.mkdir()

    def write(self, file: str, old: dict[str, Any] | None, new: dict[str, Any] | None) -> None:
        for folder, workloads in ((self.old, old), (self.new, new)):
            if workloads is not None:
                (folder / file).write_text(json.dumps({"workloads": workloads}))

    def compare(self, monkeypatch: pytest.MonkeyPatch) -> object:
        """The exit code of the command."""
        monkeypatch.setattr("sys.argv", ["compare.py", str(self.new), "--old", str(self.old)])
        with pytest.raises(SystemExit) as end:
            compare.main()
        return end.value.code


def step(ratio: float) -> dict[str, Any]:
    parts = dict.fromkeys(("total", "generation", "rest", "wall", "memory_added"), 0.5)
    return {"settings": {"prompts": 8}, "ratio": parts | {"generation": ratio}}


@pytest.mark.parametrize(("new", "code"), [(0.5, 0), (0.57, 0), (0.6, 1), (0.4, 1)])
def test_ratios_may_differ_by_a_share_of_themselves(
    new: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    folders = Folders(tmp_path)
    folders.write("grpo-step-cpu.json", {"tiny": step(0.5)}, {"tiny": step(new)})
    assert folders.compare(monkeypatch) == code
    printed = capsys.readouterr().out
    assert ("tiny: generation 0.50 -> " in printed) == bool(code)
    assert f"{code} of 4 figures differ" in printed


@pytest.mark.parametrize(("new", "code"), [(0.02, 0), (0.06, 0), (0.08, 1)])
def test_shares_may_differ_by_percentage_points(
    new: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = Folders(tmp_path)
    old, after = ({"settings": {}, "share": {"copies": share}} for share in (0.02, new))
    folders.write("time-shares-cpu.json", {"tiny": old}, {"tiny": after})
    assert folders.compare(monkeypatch) == code


def test_what_cannot_be_compared_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    folders = Folders(tmp_path)
    smaller = step(0.5) | {"settings": {"prompts": 2}}
    folders.write(
        "grpo-step-cpu.json",
        {"tiny": step(0.5), "uneven": step(0.5)},
        {"tiny": smaller, "vocab32k": step(0.5)},
    )
    folders.write("population-cpu.json", {}, None)
    assert folders.compare(monkeypatch) == 1, "nothing was compared"
    printed = capsys.readouterr().out
    for line in (
        "grpo-step-cpu.json: tiny: measured with other settings",
        "grpo-step-cpu.json: uneven: only in the old result",
        "grpo-step-cpu.json: vocab32k: only in the new result",
        f"population-cpu.json: there is no {folders.new / 'population-cpu.json'}\n",
    ):
        assert f"not compared: {line}" in printed
    assert printed.count("not compared") == 3 + len(figures.FIGURES) - 1


@pytest.mark.parametrize(("recorded", "code"), [(False, 0), (True, 1)])
def test_other_numbers_of_steps_are_other_settings_where_files_record_them(
    recorded: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = Folders(tmp_path)
    for folder, steps, top in (
        (folders.old, 9, {"steps": None} if recorded else {}),
        (folders.new, 2, {"steps": 2}),
    ):
        workload = step(0.5) | {"settings": {"prompts": 8, "measured_steps": steps}}
        written = {**top, "workloads": {"tiny": workload}}
        (folder / "grpo-step-cpu.json").write_text(json.dumps(written))
    assert folders.compare(monkeypatch) == code


def test_committed_results_are_those_of_the_committed_results(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("sys.argv", ["compare.py", str(make_report.RESULTS)])
    with pytest.raises(SystemExit, match="0"):
        compare.main()
    assert "not compared" not in capsys.readouterr().out
