"""Write the tables of the pages, and the plots, from the JSON in ``results/``.

    .venv/bin/python benchmarking/reporting/make_report.py

A block of a page between ``<!-- made by make_report.py: NAME -->`` and ``<!-- end -->`` is replaced
by the table NAME of ``tables.py``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tables import TABLES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarking" / "results"
PAGES = (ROOT / "README.md", ROOT / "benchmarking" / "README.md")
BLOCK = re.compile(
    r"(?P<begin><!-- made by make_report\.py: (?P<name>[\w ]+) -->\n).*?(?P<end><!-- end -->)",
    flags=re.DOTALL,
)


def rendered(page: str, results: Path = RESULTS) -> str:
    """Return a page with its blocks made anew.

    Raises:
        KeyError: A block names no table.
    """

    def block(match: re.Match[str]) -> str:
        file, parts = TABLES[match["name"]]
        text = f"`results/{file}` is not there yet: `make bench` writes it."
        if (results / file).is_file():
            result = json.loads((results / file).read_text())
            text = "\n\n".join(part(result) for part in parts)
        return f"{match['begin']}\n{text}\n\n{match['end']}"

    return BLOCK.sub(block, page)


def main() -> None:
    """Write pages and plots."""
    from plots import draw_all

    for page in PAGES:
        page.write_text(rendered(page.read_text()))
        print(f"written to {page.relative_to(ROOT)}")
    for plot in draw_all(RESULTS):
        print(f"written to {plot.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
