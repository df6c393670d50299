"""The page's code runs from top to bottom, and what it says of arguments is so."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from agilerl.algorithms import GRPO
from agilerl.utils.utils import create_population

PAGE = (Path(__file__).parents[2] / "docs" / "evolutionary_hpo.md").read_text()
BLOCKS = [
    textwrap.dedent(block)
    for block in re.findall(r"^ *```python\n(.*?)^ *```", PAGE, flags=re.MULTILINE | re.DOTALL)
]
# Less training than on the page.
SHORT = {
    "max_steps=800": "max_steps=48",
    "evo_steps=10": "evo_steps=1",
    "test_size=200": "test_size=20",
}


def block_with(code: str) -> str:
    (block,) = [block for block in BLOCKS if code in block]
    return block


@pytest.mark.slow
def test_all_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = BLOCKS[0]
    for as_written, short in SHORT.items():
        assert as_written in first
        first = first.replace(as_written, short)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(first, "first block", "exec"), names)
    generations = json.loads((tmp_path / "runs/evolution/lineage.json").read_text())["generations"]
    assert [each["iteration"] for each in generations] == [1, 2]
    trained = names["pop"]

    exec(block_with("INIT_HP="), names)
    assert [(a.index, a.batch_size, a.beta) for a in names["pop"]] == [
        (index, 64, 0.0) for index in range(4)
    ]
    # Drawn alike, with the same seed and search: for all four in the same order.
    drawn = [(agent.lr, agent.clip_coef, agent.max_grad_norm) for agent in names["pop"]]
    again = GRPO.population(4, hp_config=names["search"], **names["settings"])
    assert drawn == [(agent.lr, agent.clip_coef, agent.max_grad_norm) for agent in again]
    made = [*trained, *names["pop"], *again]

    exec(block_with("rates = "), names)
    assert [agent.lr for agent in names["pop"]] == [3e-5, 3e-4, 3e-3]
    by_hand = names["pop"]
    assert len({id(agent.policy.base) for agent in [*made, *by_hand]}) == 1
    exec(block_with("tournament.select(pop)"), names)
    pop = names["pop"]
    assert [agent.index for agent in pop] == [0, 1, 2] and names["elite"] in pop
    assert [len(agent.fitness) for agent in pop] == [2, 2, 2]
    for agent in [*made, *pop]:
        agent.clean_up()

    exec(block_with("class BestOnly"), names)
    assert names["BestOnly"](4, 1, None).parents([0.1, 0.3, 0.2], None) == [1, 1, 1]
    exec(block_with("plot_family_tree("), names)
    assert (tmp_path / "tree.png").stat().st_size and (tmp_path / "paths.png").stat().st_size


def test_every_block_is_run() -> None:
    assert len(BLOCKS) == 6


def test_the_hyperparameters_named_are_those_that_may_be_mutated() -> None:
    (sentence,) = re.findall(r"Those that may be named are (.*?);", PAGE, flags=re.DOTALL)
    mutable = {name for name, row in GRPO.argument_table().items() if row.mutable}
    assert set(re.findall(r"`(\w+)`", sentence)) == mutable


def test_a_wrong_key_is_refused_as_shown() -> None:
    (shown,) = re.findall(r"`(INIT_HP of GRPO has no .*?)`", PAGE)
    with pytest.raises(ValueError, match=re.escape(shown)):
        create_population("GRPO", INIT_HP={"BATCHSIZE": 4})
