"""The page's code runs from top to bottom and prints what the page shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from documentation_page import run_page

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()


def run(directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The page's names, after its code has run."""
    monkeypatch.chdir(directory)
    return run_page(PAGE, shown=8)


@dataclass
class Result:
    """As OpenEnv's ``StepResult``."""

    observation: dict[str, Any]
    reward: float | None = None
    done: bool = False


class Client:
    closed = 0

    async def reset(self, **kwargs: Any) -> Result:
        self.seed, self.turn = kwargs["seed"], 0
        return Result({"text": f"start {self.seed}"})

    async def step(self, action: dict[str, Any], **kwargs: Any) -> Result:
        self.turn += 1
        done = self.turn == 2
        return Result({"text": action["text"].upper()}, 1.0 if done else None, done)

    async def close(self) -> None:
        Client.closed += 1


def test_code_and_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = run(tmp_path, monkeypatch)
    wrapper = page["TokenObservationWrapper"]
    env = page["SyncMultiTurnVecEnv"](
        lambda: wrapper(page["OpenEnvText"](Client), page["tokenizer"], 3), batch_size=2
    )
    episodes = env.play(page["answers"]("ab"), [1, 2])
    assert episodes.returns.tolist() == [1, 1]
    assert "start 2" in episodes.first_prompts[1]
    assert "AB<|im_end|>" in episodes.transcripts[0]
    env.close()
    assert Client.closed == 2
