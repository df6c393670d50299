"""Run as a script: a run that saves every iteration, killed by SIGKILL at random instants.

    kill_during_run.py FOLDER agent|evolution

Saves are short, so every fourth instant is put off until the next save has begun, and every fourth
of a run with evolution until agents have been replaced and are being mutated. The parent imports
everything once, makes the agents and forks; a child trains, or goes on training from the newest
complete checkpoint, until it is killed. The last one goes on to the end.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from resume_helpers import (
    differences,
    everything,
    make_agents,
    reseed,
    run_reasoning,
    seed_all,
    state_of,
)

from agilerl.algorithms import GRPO
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.hpo import Mutations, TournamentSelection
from agilerl.training.checkpoint.run_checkpoint import complete_checkpoints, iteration_of

LEFTOVERS = ".iteration_*.tmp"
SEARCH = HyperparameterConfig(lr=RLParameter(1e-4, 1e-1), group_size=RLParameter(2, 5, dtype=int))


class Lingering(Mutations):
    """Takes its time over the last agent of a generation, while the file ``mark`` exists."""

    def __init__(self, mark: Path) -> None:
        super().__init__(0.2, 0, 0, 0, 0, 0.8)
        self.mark = mark

    def mutate(self, agent: Any, rng: random.Random) -> None:
        super().mutate(agent, rng)
        if agent.index == 3:
            self.mark.touch()
            time.sleep(0.2)
            self.mark.unlink()


@dataclass(frozen=True)
class Scenario:
    """What is trained, and how often it is killed."""

    size: int
    kills: int
    max_steps: int
    """Of every five, three iterations."""
    mark: Path | None = None
    """A file that exists while agents are mutated; None: there is no evolution."""

    def options(self) -> dict[str, Any]:
        options = {"max_steps": self.max_steps, "evaluation_interval": 5}
        if self.mark is None:
            return options
        selection = TournamentSelection(2, elitism=True, population_size=self.size)
        return options | {"tournament": selection, "mutation": Lingering(self.mark), "evo_steps": 2}


SCENARIOS: dict[str, Callable[[Path], Scenario]] = {
    "agent": lambda folder: Scenario(size=1, kills=20, max_steps=60),
    "evolution": lambda folder: Scenario(size=4, kills=12, max_steps=30, mark=folder / "mutating"),
}


def start(path: Path, agents: list[GRPO], scenario: Scenario) -> int:
    """Fork a child that trains in ``path``; returns its process id."""
    child = os.fork()
    if child:
        return child
    try:
        resume_from = path if complete_checkpoints(path) else None
        seed_all() if resume_from is None else reseed()
        pop = run_reasoning(
            path,
            pop=agents,
            resume_from=resume_from,
            **scenario.options(),
        )
        facts = everything(path, pop)
        facts["lineage"] = generations(path)
        facts["hyperparameters"] = [agent.attributes(SEARCH) for agent in pop]
        facts["elite"] = {name: data.hex() for name, data in facts["elite"].items()}
        (path / "facts.json").write_text(json.dumps(facts))
        os._exit(0)
    except BaseException:  # noqa: BLE001  shown; a child must never come out of here
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def finish(child: int) -> None:
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 0, "the run failed by itself"


def longest_life(path: Path) -> float:
    """Seconds from a start to the latest kill: about three iterations on this machine, now."""
    with (path / "metrics.csv").open(newline="") as lines:
        seconds = [
            float(row["wall_seconds"]) for row in csv.DictReader(lines) if row["agent"] == "0"
        ]
    return 1.5 * seconds[1] + 3 * (seconds[-1] - seconds[1]) / (len(seconds) - 2)


def last_row(path: Path) -> int:
    """The last iteration whose row is whole; -1: none."""
    file = path / "metrics.csv"
    if not file.exists():
        return -1
    with file.open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if None not in row.values()]
    return int(rows[-1]["iteration"]) if rows else -1


def check(path: Path) -> int:
    """How many whole iterations are not in the newest checkpoint, which the next child reads."""
    complete = complete_checkpoints(path)
    newest = state_of(complete[-1])["iteration"] if complete else 0
    return max(last_row(path) - newest, 0)


def generations(path: Path) -> list[Any]:
    """Those in ``lineage.json``, which is whole at any time."""
    file = path / "lineage.json"
    return json.loads(file.read_text())["generations"] if file.exists() else []


@contextlib.contextmanager
def leftovers(path: Path) -> Iterator[set[int]]:
    """Numbers of the folders that killed saves left behind.

    They are held open: the number of one that is removed meanwhile is not given to another.
    """
    with contextlib.ExitStack() as stack:
        found = set()
        for folder in path.glob(LEFTOVERS):
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            found.add(os.fstat(descriptor).st_ino)
        yield found


def in_a_save(path: Path, before: set[int]) -> bool:
    """Whether there is a folder of a save that is not complete, but for those of ``before``."""
    newest = max((iteration_of(each) for each in complete_checkpoints(path)), default=0)
    for folder in path.glob(LEFTOVERS):
        # Earlier ones were complete and are being removed.
        later = iteration_of(Path(folder.name.split(".")[1])) > newest
        with contextlib.suppress(FileNotFoundError):  # it was renamed just now
            if later and folder.stat().st_ino not in before:
                return True
    return False


def wait_until(reached: Callable[[], bool], child: int) -> None:
    """Until something is the case, or the run is over."""
    over = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while not reached() and os.waitid(os.P_PID, child, over) is None:
        time.sleep(0.0005)


def main(folder: Path, name: str) -> None:
    torch.set_num_threads(1)
    scenario = SCENARIOS[name](folder)
    mark = scenario.mark
    agents = make_agents(scenario.size, hp_config=SEARCH)
    never_killed = folder / "never_killed"
    finish(start(never_killed, agents, scenario))
    expected = json.loads((never_killed / "facts.json").read_text())

    longest = longest_life(never_killed)
    instants = random.Random(2024)
    killed = in_save = in_generation = lost = finished = 0
    path = folder / "run_0"
    while killed < scenario.kills:
        with leftovers(path) as before:
            child = start(path, agents, scenario)
            time.sleep(instants.uniform(0.0, longest))
            if killed % 4 == 3:
                wait_until(partial(in_a_save, path, before), child)
            elif killed % 4 == 1 and mark is not None:
                wait_until(mark.exists, child)
            os.kill(child, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            hit = in_a_save(path, before)
        if code == 0:  # it was done before: a fast machine; go on with another run
            finished += 1
            path = folder / f"run_{finished}"
            continue
        assert code == -signal.SIGKILL, "the run failed by itself"
        killed += 1
        in_save += hit
        if mark is not None and mark.exists():
            in_generation += 1
            mark.unlink()
        lost = max(lost, check(path))
        written = generations(path)
        assert written == expected["lineage"][: len(written)]
    finish(start(path, agents, scenario))
    for number in range(finished + 1):
        facts = json.loads((folder / f"run_{number}" / "facts.json").read_text())
        assert differences(facts, expected) == [], differences(facts, expected)
        assert not list((folder / f"run_{number}").glob(LEFTOVERS))
    print(
        f"longest={longest:.2f} killed={killed} in_save={in_save} in_generation={in_generation} "
        f"generations={len(expected['lineage'])} lost={lost} runs={finished + 1}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2])
