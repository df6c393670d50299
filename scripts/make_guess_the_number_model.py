"""Rebuild the model of the multi-turn demonstration: a tiny Qwen2 that plays Guess The Number.

Supervised training on games whose players heed the hints at only some of their guesses. The model
learns how such players play on average: it can read the hints, but its likeliest guess often
ignores them. Reinforcement learning then has something to build on and much left to gain. The
tokenizer is trained here too. Nothing is downloaded; the same seed on the same kind of machine
gives the same weights.

    python scripts/make_guess_the_number_model.py

takes a few minutes on two CPU cores and logs the win rates that it writes into the model card.
"""

from __future__ import annotations

import logging
import math
import random
import re
from collections.abc import Iterator
from itertools import count

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM
from warm_up import Batch, Supervised, make_batch, save, start

from agilerl.testing import bundled_model_path, guess_the_number_env, tiny_model
from agilerl.testing.guess_the_number import (
    HELD_OUT_SEED,
    Game,
    boxed,
    chat_piece,
    game_tokens,
    mixed_player,
    play,
    random_player,
    reset,
)
from agilerl.testing.tokenizer import TURN_END_TOKEN_ID, trained_tokenizer

logger = logging.getLogger("make_guess_the_number_model")

HEED = 0.45
"""Share of the players' guesses that heed the hints."""
STEPS = 500
ROWS = 32
"""Games in one training step."""
INITIALIZER_RANGE = 0.08
"""With the usual 0.02 so narrow a model takes several times as long to read numbers in hints."""
LR = 2e-3
RAMP_STEPS = 20
TOKENIZER_GAMES = 400
VOCAB_SIZE = 512
MIN_SENTENCE = 20
"""Characters from which a fixed part of the instructions gets a token of its own."""
MAX_ACTION_TOKENS = 8
HELD_OUT = 200
START = (0.3, 0.5)
"""Range of the greedy win rate to end in; outside it is an error."""

CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# A tiny Qwen2 that plays Guess The Number, half heeding the hints

A starting point for multi-turn reinforcement learning on a CPU: demos, tests and documentation of
`agilerl` use it. It is good for nothing else.

* **Model**: Qwen2, {layers} layers, hidden size {hidden}, tied embeddings, float32,
  {parameters:,} parameters.
* **Tokenizer**: {vocabulary} ids. One per byte (0 to 255), `<|pad|>`, `<|im_start|>`,
  `<|im_end|>` and `<|endoftext|>`; then byte pairs merged within words of the game's text, every
  digit on its own; then one for each fixed sentence of the instructions. The chat template is
  ChatML without a default system message; `<|im_end|>` ends an answer.
* **Task**: GEM's `GuessTheNumberEnv(min_number=1, max_number=6, max_turns=3)`, unmodified. An
  answer is `\\boxed{{3}}`. The instructions take {prompt} tokens in the chat template, an answer
  {answer}, a hint {hint} with the template's text around it.
* **Training**: supervised, {steps:,} steps of {rows} games, AdamW at {lr} decaying to 0, loss on
  the answers and the ends of their turns. The players open with a 3 or a 4 (one in ten times with
  any number); later guesses heed the hints with probability {heed} (nearer the middle of what they
  leave more often), and else are a 6, whatever the hints. So the likeliest guess of the finished
  model is mostly the careless 6, while sampled guesses heed the hints about half of the time.
  Seeds from {held_out:,} on are held out: none of these was played.
* **Made by** `scripts/make_guess_the_number_model.py --seed {seed}`: random initial weights, no
  other data.
* **Licence**: Apache-2.0.

| player, {games} held-out seeds | win rate | mean return |
|---|---|---|
{results}

The return is the environment's own: 1 for the number; else, in the last turn, one minus the
distance of the guess over the range, which pays any player for a guess near the middle. A player
who halves what the hints leave wins every game. There are only 36 different beginnings (the number,
and the example in the instructions), so held-out seeds show how well a model plays, not what it
does in games unlike those it saw.

```python
from agilerl.testing import load_bundled_model

model, tokenizer = load_bundled_model("guess_the_number")
```
"""


def main() -> None:
    """Train, measure and save."""
    args = start(__doc__.splitlines()[0], bundled_model_path("guess_the_number"))
    rng = random.Random(args.seed)
    tokenizer = make_tokenizer(rng)
    model = tiny_model(
        vocab_size=len(tokenizer),
        hidden_size=128,
        layers=4,
        seed=args.seed,
        intermediate_size=256,
        initializer_range=INITIALIZER_RANGE,
    )
    warm_up(model, tokenizer, rng)
    results, greedy = measure(model, tokenizer)
    save(model, tokenizer, card(model, tokenizer, results, args.seed), args.output)
    if not START[0] <= greedy <= START[1]:
        raise RuntimeError(
            f"the greedy win rate is {greedy:.3f}, outside {START}; try another seed"
        )


def make_tokenizer(rng: random.Random) -> PreTrainedTokenizerFast:
    """Train the tokenizer on games, also on such in which guesses leave the range."""
    env = guess_the_number_env()
    players = [mixed_player(HEED, rng), random_player(rng, 1, 9)]
    games = [play(env, players[seed % 2], seed) for seed in range(TOKENIZER_GAMES)]
    instructions = games[0].observations[0]
    parts = re.split(r"(?<=\n)|\d", instructions)
    tokenizer = trained_tokenizer(
        [text for game in games for text in _texts(game)],
        VOCAB_SIZE,
        sentences=[part for part in parts if len(part) >= MIN_SENTENCE],
    )
    logger.info("tokenizer: %d ids", len(tokenizer))
    return tokenizer


def _texts(game: Game) -> list[str]:
    shown = ["user\n" + text + "\nassistant\n" for text in game.observations]
    return [*shown, *game.actions]


def warm_up(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> None:
    """Train in place on ``STEPS`` batches of games."""
    training = Supervised(model, LR, _schedule)
    for step, batch in zip(range(1, STEPS + 1), batches(tokenizer, rng), strict=False):
        loss = training.step(batch)
        if step % 50 == 0:
            logger.info("step %d: loss %.3f", step, loss)
        if step % 100 == 0:
            logger.info("step %d: greedy win rate %.3f", step, win_rate(model, tokenizer)[0])


def _schedule(step: int) -> float:
    """Ramp up, then follow a cosine down to 0: the last steps settle the probabilities."""
    return min((step + 1) / RAMP_STEPS, 0.5 * (1 + math.cos(math.pi * step / STEPS)))


def batches(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Iterator[Batch]:
    """Yield batches of ``ROWS`` games, each on a seed of its own, without end."""
    env = guess_the_number_env()
    player = mixed_player(HEED, rng)
    for first in count(0, ROWS):
        games = [play(env, player, seed) for seed in range(first, first + ROWS)]
        yield make_batch(tokenizer, [game_tokens(tokenizer, game) for game in games])


def measure(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> tuple[str, float]:
    """Log how the finished model plays; return it as a Markdown table, and the greedy win rate."""
    torch.manual_seed(0)
    rng = random.Random(0)
    env = guess_the_number_env()
    seeds = [HELD_OUT_SEED + i for i in range(HELD_OUT) for _ in range(8)]
    guesser, heeder = random_player(rng), mixed_player(1.0, rng)
    rates = {
        "the model, greedy": win_rate(model, tokenizer),
        "the model, 8 games each at temperature 1": win_rate(model, tokenizer, samples=8),
        "random guesses, 8 games each": _rates([play(env, guesser, seed) for seed in seeds]),
        "always heeding the hints as in training, 8 games each": _rates(
            [play(env, heeder, seed) for seed in seeds]
        ),
    }
    for name, (won, returned) in rates.items():
        logger.info("%s: win rate %.3f, mean return %.3f", name, won, returned)
    table = [f"| {name} | {won:.3f} | {mean:.3f} |" for name, (won, mean) in rates.items()]
    return "\n".join(table), rates["the model, greedy"][0]


def win_rate(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, samples: int = 0
) -> tuple[float, float]:
    """Play the held-out seeds.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        samples: 0 for one greedy game per seed, else the games to sample at temperature 1.

    Returns:
        The win rate and the mean return.
    """
    seeds = [HELD_OUT_SEED + i for i in range(HELD_OUT) for _ in range(max(samples, 1))]
    return _rates(play_together(model, tokenizer, seeds, sample=samples > 0))


def _rates(games: list[Game]) -> tuple[float, float]:
    wins = sum(game.won for game in games)
    return wins / len(games), sum(sum(game.rewards) for game in games) / len(games)


class Seat:
    """One game in progress, and its tokens so far."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.tokenizer = tokenizer
        self.env = guess_the_number_env()
        observation = reset(self.env, seed)
        self.observations, self.actions, self.rewards = [observation], [], []
        self.ids = self._tokens(chat_piece(observation, first=True))
        self.done = False

    def act(self, written: list[int]) -> None:
        """Answer with ids up to and including the end of the turn, or up to the limit."""
        if TURN_END_TOKEN_ID in written:
            written = written[: written.index(TURN_END_TOKEN_ID) + 1]
        self.actions.append(self.tokenizer.decode(written, skip_special_tokens=True))
        text, reward, terminated, truncated, info = self.env.step(self.actions[-1])
        self.rewards.append(float(reward))
        self.done = terminated or truncated
        if not self.done:
            self.observations.append(info.get("prefix", "") + text + info.get("suffix", ""))
            self.ids += written + self._tokens(chat_piece(self.observations[-1], first=False))

    def game(self) -> Game:
        """Return the finished game."""
        return Game(tuple(self.observations), tuple(self.actions), tuple(self.rewards))

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids


@torch.no_grad()
def play_together(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, seeds: list[int], *, sample: bool
) -> list[Game]:
    """Let the model play one game per seed, all of them side by side."""
    model.eval()
    seats = [Seat(tokenizer, seed) for seed in seeds]
    how = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
    while running := [seat for seat in seats if not seat.done]:
        batch = tokenizer.pad({"input_ids": [s.ids for s in running]}, return_tensors="pt")
        output = model.generate(**batch, max_new_tokens=MAX_ACTION_TOKENS, **how)
        for seat, row in zip(running, output[:, batch["input_ids"].shape[1] :], strict=True):
            seat.act(row.tolist())
    return [seat.game() for seat in seats]


def card(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, results: str, seed: int
) -> str:
    """Write the model card."""
    env = guess_the_number_env()
    texts = play(env, lambda shown: 1 if len(shown) == 1 else 2, HELD_OUT_SEED).observations
    pieces = [chat_piece(texts[0], first=True), boxed(1), chat_piece(texts[1], first=False)]
    prompt, answer, hint = (len(tokenizer(text).input_ids) for text in pieces)
    return CARD.format(
        layers=model.config.num_hidden_layers,
        hidden=model.config.hidden_size,
        parameters=model.num_parameters(),
        vocabulary=len(tokenizer),
        prompt=prompt,
        answer=answer + 1,
        hint=hint,
        steps=STEPS,
        rows=ROWS,
        lr=LR,
        heed=HEED,
        held_out=HELD_OUT_SEED,
        games=HELD_OUT,
        seed=seed,
        results=results,
    )


if __name__ == "__main__":
    main()
