"""Finetune a language model to play GEM's Guess The Number over several turns, with GRPO.

    python examples/multiturn_guess_the_number.py --credit both --seed 0

A model of under a million parameters, warmed up on games of mixed quality, reads the hints
"higher" and "lower" only some of the time. Reinforcement learning on the game's own reward makes it
read them nearly always. Two ways to give credit are compared: one advantage for the whole episode
("trajectory"), or one for each turn ("turn"). Shown are the mean return and the win rate over 200
held-out games: on the last turn the game also pays for being close, so the return alone would
flatter a player that never wins. With --vllm the answers are sampled by a vLLM engine instead of by
Hugging Face's model.
"""

from __future__ import annotations

import argparse
import csv
import logging
import random
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from peft import LoraConfig
from transformers import PreTrainedTokenizerBase

from agilerl.algorithms import GRPO
from agilerl.llm_envs import EVALUATION_SEED_START, SyncMultiTurnVecEnv, TokenObservationWrapper
from agilerl.testing import guess_the_number_env, load_bundled_model
from agilerl.training.train_llm import finetune_llm_multiturn
from agilerl.typing import Evaluation
from agilerl.utils.algo_utils import VLLMConfig

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MAX_TURNS = 3
GROUPS = 16
GROUP_SIZE = 8
LORA_RANK = 32
ITERATIONS = 40
HELD_OUT_GAMES = 200
CREDITS = ("trajectory", "turn")
# All episodes of a rollout at a time.
VLLM = VLLMConfig(max_num_seqs=GROUPS * GROUP_SIZE, max_lora_rank=LORA_RANK)


@dataclass(frozen=True)
class Score:
    """How a player did over the held-out games."""

    player: str
    mean_return: float
    win_rate: float


def main() -> None:
    """Train with each kind of credit, and print and save the results."""
    args = parse_arguments()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    folder = Path(args.output) / f"guess-the-number-seed{args.seed}"
    credits = CREDITS if args.credit == "both" else (args.credit,)

    scores = [random_player()]
    for credit in credits:
        agent, tokenizer = make_agent(credit, args.seed, vllm=args.vllm)
        before = play_held_out(agent, tokenizer)
        if len(scores) == 1:
            scores.append(score("before training", before))
        minutes = train(agent, tokenizer, folder / credit, args)
        after = play_held_out(agent, tokenizer)
        scores.append(score(f"{credit} credit, {minutes:.1f} minutes", after))
        agent.save_checkpoint(folder / credit / "checkpoint")
        print_game(before, after)
        print_time(folder / credit / "run" / "metrics.csv")
        agent.clean_up()

    print(f"\ngeneration by {'vLLM' if args.vllm else 'Hugging Face'}")
    print(f"{HELD_OUT_GAMES} held-out games, greedy     mean return   win rate")
    for row in scores:
        print(f"{row.player:<32} {row.mean_return:>9.3f}   {row.win_rate:>8.3f}")
    runs = {credit: folder / credit / "run" / "metrics.csv" for credit in credits}
    plot_curves(runs, folder / "learning_curves.png")
    print(f"\nlearning curves: {folder / 'learning_curves.png'}")
    for credit in credits:
        print(f"adapter:         {folder / credit / 'checkpoint' / 'actor'}")


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--credit", choices=[*CREDITS, "both"], default="both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--iterations", type=int, default=ITERATIONS, help="rollouts of 16 games x 8 episodes"
    )
    parser.add_argument(
        "--vllm", action="store_true", help="generate with vLLM, which must be installed"
    )
    parser.add_argument("--output", default="demo_output")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args()


def make_agent(
    credit: str, seed: int, *, vllm: bool = False
) -> tuple[GRPO, PreTrainedTokenizerBase]:
    """A GRPO agent on the bundled model."""
    model, tokenizer = load_bundled_model("guess_the_number")
    agent = GRPO(
        actor_network=model,
        pad_token_id=tokenizer.pad_token_id,
        pad_token=tokenizer.pad_token,
        advantage_granularity=credit,
        lora_config=LoraConfig(
            r=LORA_RANK, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        batch_size=128,
        micro_batch_size_per_gpu=128,
        group_size=GROUP_SIZE,
        lr=5e-4,
        beta=0.0,
        max_grad_norm=1.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_output_tokens=12,
        max_model_len=512,
        gradient_checkpointing=False,
        use_vllm=vllm,
        vllm_config=VLLM if vllm else None,
        seed=seed,
    )
    return agent, tokenizer


def make_env(tokenizer: PreTrainedTokenizerBase) -> TokenObservationWrapper:
    """One game: a number from 1 to 6 in three turns."""
    return TokenObservationWrapper(
        guess_the_number_env(min_number=1, max_number=6, max_turns=MAX_TURNS),
        tokenizer,
        max_turns=MAX_TURNS,
    )


def train(
    agent: GRPO, tokenizer: PreTrainedTokenizerBase, folder: Path, args: argparse.Namespace
) -> float:
    """Finetune the agent; returns the minutes it took."""
    started = time.perf_counter()
    finetune_llm_multiturn(
        [agent],
        max_turns=MAX_TURNS,
        env_factory=make_env,
        env_config={"tokenizer": tokenizer},
        # One pass over as many games as the iterations need, so that none is played twice.
        max_steps=None,
        num_epochs=1,
        train_seeds=GROUPS * args.iterations,
        evaluation_interval=5,
        evaluation_episodes=HELD_OUT_GAMES,
        checkpoint_path=folder / "run",
        max_reward=1.0,
        verbose=not args.quiet,
        groups_per_iteration=GROUPS,
        seed=args.seed,
    )
    return (time.perf_counter() - started) / 60


def play_held_out(agent: GRPO, tokenizer: PreTrainedTokenizerBase) -> Evaluation:
    """Greedy games on seeds that were never trained on."""
    env = SyncMultiTurnVecEnv(
        make_env,
        batch_size=HELD_OUT_GAMES,
        env_config={"tokenizer": tokenizer},
        evaluation_episodes=HELD_OUT_GAMES,
    )
    with agent.rollout():
        evaluation = env.evaluate(lambda prompts: agent.get_action(prompts, training=False))
    env.close()
    return evaluation


def random_player() -> Score:
    """The same games, played by guessing any number each turn."""
    game = guess_the_number_env(min_number=1, max_number=6, max_turns=MAX_TURNS)
    guesses = random.Random(0)
    returns = []
    for number in range(HELD_OUT_GAMES):
        game.reset(seed=EVALUATION_SEED_START + number)
        total, over = 0.0, False
        while not over:
            _, reward, terminated, truncated, _ = game.step(f"\\boxed{{{guesses.randint(1, 6)}}}")
            total, over = total + reward, terminated or truncated
        returns.append(total)
    return Score("random player", sum(returns) / len(returns), share_won(returns))


def score(player: str, evaluation: Evaluation) -> Score:
    """Mean return and win rate."""
    returns = evaluation.rewards.tolist()
    return Score(player, sum(returns) / len(returns), share_won(returns))


def share_won(returns: list[float]) -> float:
    """Share of games won: a guessed number pays 1, and nothing else pays that much."""
    return sum(value >= 1.0 for value in returns) / len(returns)


def print_game(before: Evaluation, after: Evaluation) -> None:
    """A held-out game that training turned from lost to won, if there is one."""
    turned = [
        i for i in range(HELD_OUT_GAMES) if before.rewards[i] < 1.0 and after.rewards[i] >= 1.0
    ]
    for i in turned[:1]:
        for label, evaluation in (("before", before), ("after", after)):
            print(f"\nheld-out game {i}, {label} (return {float(evaluation.rewards[i]):.2f}):")
            print(evaluation.completions[i])


def print_time(metrics: Path) -> None:
    """Episodes per second of training, and where the time goes."""
    stages = ("generation", "environment", "learning")
    with metrics.open() as file:
        rows = [row for row in csv.DictReader(file) if row["learning_seconds"]]
    seconds = {stage: sum(float(row[f"{stage}_seconds"]) for row in rows) for stage in stages}
    total = sum(seconds.values())
    shares = ", ".join(f"{stage} {100 * seconds[stage] / total:.0f}%" for stage in stages)
    print(f"\n{len(rows) * GROUPS * GROUP_SIZE / total:.0f} episodes per second; {shares}")


def plot_curves(runs: dict[str, Path], image: Path) -> None:
    """Return and win rate over time, each kind of credit a line."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharex=True)
    panels = (("fitness", "mean return"), ("eval_accuracy", "win rate"))
    for credit, metrics in runs.items():
        with metrics.open() as file:
            rows = [row for row in csv.DictReader(file) if row["fitness"]]
        minutes = [float(row["wall_seconds"]) / 60 for row in rows]
        for panel, (column, title) in zip(axes, panels, strict=True):
            values = [float(row[column]) for row in rows]
            panel.plot(minutes, values, marker="o", label=f"{credit} credit")
            panel.set(xlabel="minutes", ylim=(0, 1), title=f"{title}, held-out games")
    for panel in axes:
        panel.grid(alpha=0.3)
        panel.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(image, dpi=120)


if __name__ == "__main__":
    main()
