"""Run as a script: save over a checkpoint again and again, killed by SIGKILL at another file event.

The parent loads everything once and forks; each child raises the kill from an audit hook, so the
code under test is the real one at every step: mkdir, each file opened, both renames, each removal.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from agent_helpers import make_agent, randomise, train, weights

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.listdir")


def save_and_die(agent: object, path: Path, at: int) -> int:
    """Save in a child that is killed at its ``at``-th file event below the parent of ``path``."""
    child = os.fork()
    if child == 0:
        left = at

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            # rmtree walks by descriptor and names entries only relatively: those count as well.
            if event in EVENTS and arguments and isinstance(arguments[0], str | os.PathLike):
                name = os.fspath(arguments[0])
                if name.startswith(str(path.parent)) or not os.path.isabs(name):
                    left -= 1
                    if left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        agent.save_checkpoint(path)  # type: ignore[attr-defined]
        os._exit(0)
    return os.waitpid(child, 0)[1]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    old = randomise(make_agent())
    train(old)
    new = randomise(old.clone(), seed=9)
    probe = make_agent()
    path = folder / "run"
    old.save_checkpoint(path)
    outcomes: list[str] = []
    between = 0
    for at in range(1, 1000):
        status = save_and_die(new, path, at)
        between += not path.exists()
        probe.load_checkpoint(path, load_optimizer=True)
        loaded = weights(probe)
        outcome = [
            name
            for name, agent in (("old", old), ("new", new))
            if torch.equal(loaded, weights(agent))
        ]
        assert len(outcome) == 1, "neither the old nor the new checkpoint"
        outcomes += outcome
        # The next save repairs whatever the kill left.
        old.save_checkpoint(path)
        left = sorted(entry.name for entry in folder.iterdir())
        assert left == ["run"], left
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
    assert outcomes == sorted(outcomes, reverse=True), "old until the rename, new from then on"
    print(f"killed={len(outcomes) - 1} old={outcomes.count('old')} between={between}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
