"""Evolve learning rates while a population trains; compare it with no evolution, random search.

    python examples/evolve.py --seeds 0 1 2

Three populations of four agents train on the task of grpo_reasoning.py, each on one frozen base:

evolution   learning rates spread over two decades; every few iterations better agents replace
            worse ones, and learning rates mutate
fixed       the same four agents, trained without evolution
random      random search: four learning rates drawn from the same range, trained without evolution

All three consume the same number of completions. Agents are selected by their accuracy on one part
of the held-out words; shown is the accuracy, on the other part, of the agent that is best on the
first. Written to the output folder: the curves as JSON and PNG, and of each evolution the family
tree and the paths of the learning rates.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import logging
import os
import random
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib
from grpo_reasoning import GROUP_SIZE, PROMPTS_PER_STEP, make_agent, make_env

from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.hpo import PerturbOrResample, TruncationSelection
from agilerl.hpo.plots import plot_family_tree, plot_hyperparameters, read_generations
from agilerl.llm_envs import ReasoningGym
from agilerl.testing import load_bundled_model
from agilerl.training.train_llm import finetune_llm_reasoning
from agilerl.typing import Act, Evaluation

matplotlib.use("Agg")
import matplotlib.pyplot as plt

METHODS = ("evolution", "fixed", "random")
MEMBERS = 4
LEARNING_RATE = RLParameter(min=3e-5, max=3e-3, scale="log", shrink_factor=0.5, grow_factor=2.0)
COLOURS = {
    "evolution": "tab:green",
    "best of fixed": "tab:blue",
    "median of fixed": "tab:gray",
    "best of random": "tab:orange",
}


class SelectionAndReport(ReasoningGym):
    """A task whose fitness comes from the first test rows only; the others are for the report.

    The best of several agents is the best partly by luck: its accuracy on the rows that it was
    chosen by is too high. On rows that took no part in the choice it is not.
    """

    def __init__(self, *args: Any, selection_rows: int, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.selection_rows = selection_rows
        self.reported: list[float] = []
        """Accuracy on the rows for the report, one per evaluation of an agent."""

    def evaluate(self, act: Act, loop: int = 1) -> Evaluation:
        """Answers to all test rows; those for the report are only noted."""
        whole = super().evaluate(act, loop)
        rows = self.selection_rows
        self.reported.append(float(whole.rewards[rows:].mean()))
        return Evaluation(
            whole.rewards[:rows],
            whole.questions[:rows],
            whole.answers[:rows],
            whole.completions[:rows],
        )


def main() -> None:
    """Train with each method and seed, and print and save the results."""
    args = parse_arguments()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    output = Path(args.output) / "evolve"
    runs = []
    for seed in args.seeds:
        for method in METHODS:
            print(f"seed {seed}, {method}", flush=True)
            runs.append(train(method, seed, output / f"seed{seed}" / method, args))
        print_generations(runs[-len(METHODS)])
        folder = output / f"seed{seed}"
        plot_family_tree(folder / "evolution", folder / "family_tree.png")
        plot_hyperparameters(folder / "evolution", folder / "learning_rates.png")
    save(runs, args, output)
    print_summary(runs, args.seeds)
    print(
        f"\ncurves:         {output / 'curves.json'}, {output / 'curves.png'}\n"
        f"family tree:    {output / f'seed{args.seeds[0]}' / 'family_tree.png'}\n"
        f"learning rates: {output / f'seed{args.seeds[0]}' / 'learning_rates.png'}"
    )


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--iterations", type=int, default=80, help="rollouts of 32 prompts x 8, of each agent"
    )
    parser.add_argument("--evo-steps", type=int, default=20, help="iterations of a generation")
    parser.add_argument(
        "--evaluation-interval", type=int, default=10, help="iterations between two evaluations"
    )
    parser.add_argument("--selection-rows", type=int, default=300, help="questions to select by")
    parser.add_argument("--report-rows", type=int, default=500, help="other questions, to report")
    parser.add_argument("--output", default="demo_output")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args()
    if args.iterations <= args.evo_steps:
        parser.error(
            f"--iterations is {args.iterations}; it must be more than --evo-steps, which is "
            f"{args.evo_steps}: the last iteration of a run makes no generation"
        )
    return args


def initial_learning_rates(method: str, seed: int) -> list[float]:
    """Spread over the range, or drawn from it."""
    if method == "random":
        drawn = random.Random(seed)  # the same draws as GRPO.population makes
        return [LEARNING_RATE.sample(drawn) for _ in range(MEMBERS)]
    ratio = LEARNING_RATE.max / LEARNING_RATE.min
    middles = [(quarter + 0.5) / MEMBERS for quarter in range(MEMBERS)]
    return [LEARNING_RATE.min * ratio**middle for middle in middles]


def evolution(evo_steps: int) -> dict[str, Any]:
    """Options of the training function, as in Population Based Training."""
    return {
        "evo_steps": evo_steps,
        # A high learning rate costs accuracy at first and pays later. So that it lives to do that,
        # one agent of four is replaced at a time, and a score is the mean of two evaluations.
        "tournament": TruncationSelection(population_size=MEMBERS, share=0.25, eval_loop=2),
        # The range is covered from the start, so that no rate need be drawn anew.
        "mutation": PerturbOrResample(resample_probability=0.0),
    }


def train(method: str, seed: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Train one population; returns its curve, JSON-compatible."""
    model, tokenizer = load_bundled_model()
    env = make_env(
        tokenizer,
        seed,
        test_size=args.selection_rows + args.report_rows,
        env_class=SelectionAndReport,
        selection_rows=args.selection_rows,
    )
    rates = initial_learning_rates(method, seed)
    search = HyperparameterConfig(lr=LEARNING_RATE)
    population = [
        make_agent("grpo", model, tokenizer, seed, index=index, lr=rate, hp_config=search)
        for index, rate in enumerate(rates)
    ]
    finetune_llm_reasoning(
        population,
        env=env,
        max_steps=PROMPTS_PER_STEP * args.iterations,
        evaluation_interval=args.evaluation_interval,
        checkpoint_path=folder,
        max_reward=1.0,
        verbose=not args.quiet,
        **(evolution(args.evo_steps) if method == "evolution" else {}),
    )
    generations = read_generations(folder) if method == "evolution" else []
    for agent in population:
        agent.clean_up()
    return {
        "method": method,
        "seed": seed,
        "curve": curve(folder / "metrics.csv", env.reported, rates, generations),
        "generations": generations,
    }


def curve(
    metrics: Path, reported: list[float], rates: list[float], generations: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """One point per evaluation: what the population has consumed, and how good its members are.

    Args:
        metrics: Of the run.
        reported: Accuracy of each evaluated agent, in the order of the rows with a fitness.
        rates: Initial learning rates.
        generations: Of the run.
    """
    with metrics.open() as file:
        rows = [row for row in csv.DictReader(file) if row["fitness"]]
    mutated = {
        each["iteration"]: [member["hyperparameters"]["lr"] for member in each["members"]]
        for each in generations
    }
    accuracies = dict(zip(map(row_key, rows), reported, strict=True))
    points = []
    for iteration in sorted({int(row["iteration"]) for row in rows}):
        evaluated = [row for row in rows if int(row["iteration"]) == iteration]
        members = [
            {
                "learning_rate": rate,
                "fitness": round(float(row["fitness"]), 4),
                "accuracy": round(accuracies[row_key(row)], 4),
            }
            for row, rate in zip(evaluated, rates, strict=True)
        ]
        best = max(range(MEMBERS), key=lambda n: members[n]["fitness"])
        points.append(
            {
                "iteration": iteration,
                "samples": GROUP_SIZE * sum(int(row["steps"]) for row in evaluated),
                "members": members,
                "best": best,
                "accuracy_of_best": members[best]["accuracy"],
                "median_accuracy": statistics.median(each["accuracy"] for each in members),
            }
        )
        # Selection and mutation come after the evaluation.
        rates = mutated.get(iteration, rates)
    return points


def row_key(row: dict[str, str]) -> tuple[int, int]:
    """What tells an evaluation from the others of a run."""
    return int(row["iteration"]), int(row["agent"])


def lines(runs: list[dict[str, Any]], seed: int) -> dict[str, list[float]]:
    """The accuracies that are compared, one per evaluation, by name."""
    curves = {run["method"]: run["curve"] for run in runs if run["seed"] == seed}
    return {
        "evolution": [point["accuracy_of_best"] for point in curves["evolution"]],
        "best of random": [point["accuracy_of_best"] for point in curves["random"]],
        "best of fixed": [point["accuracy_of_best"] for point in curves["fixed"]],
        "median of fixed": [point["median_accuracy"] for point in curves["fixed"]],
    }


def print_generations(run: dict[str, Any]) -> None:
    """Learning rate and fitness of each member at every evaluation."""
    parents = {
        each["iteration"]: [member["parent"] for member in each["members"]]
        for each in run["generations"]
    }
    print(
        f"\nseed {run['seed']}: learning rate and fitness (accuracy on the questions to select by) "
        "\n* has the highest fitness; <n is replaced by a clone of n after the evaluation"
    )
    print("iteration  " + "".join(f"agent {n:<14}" for n in range(MEMBERS)))
    for point in run["curve"]:
        cells = []
        for n, member in enumerate(point["members"]):
            parent = parents.get(point["iteration"], range(MEMBERS))[n]
            mark = "*" if n == point["best"] else ""
            mark += "" if parent == n else f"<{parent}"
            cells.append(f"{member['learning_rate']:.1e} {member['fitness']:.3f} {mark:<5}")
        print(f"{point['iteration']:>9}  " + "".join(cells))
    print()


def print_summary(runs: list[dict[str, Any]], seeds: list[int]) -> None:
    """Accuracy at the end, by method and seed."""
    finals = {seed: {k: line[-1] for k, line in lines(runs, seed).items()} for seed in seeds}
    names = list(finals[seeds[0]])
    samples = runs[0]["curve"][-1]["samples"]
    print(f"accuracy on held-out questions after {samples:,} completions of the whole population")
    print("seed   " + "".join(f"{name:>17}" for name in names))
    for seed, final in finals.items():
        print(f"{seed:<7}" + "".join(f"{final[name]:>17.3f}" for name in names))
    if len(seeds) > 1:
        means = [statistics.mean(final[name] for final in finals.values()) for name in names]
        print("mean   " + "".join(f"{mean:>17.3f}" for mean in means))
    print("\nlearning rates at the end (* of the agent shown above)")
    for run in runs:
        last = run["curve"][-1]
        rates = [
            f"{member['learning_rate']:.1e} {member['accuracy']:.3f}" + "* "[n != last["best"]]
            for n, member in enumerate(last["members"])
        ]
        print(f"seed {run['seed']}, {run['method']:<10} " + "  ".join(rates))


def save(runs: list[dict[str, Any]], args: argparse.Namespace, output: Path) -> None:
    """Write the curves as JSON and draw them."""
    packages = ("torch", "transformers", "peft", "datasets", "reasoning-gym")
    content = {
        "command": shlex.join(["python", *sys.argv]),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "cores": os.cpu_count(),
        "settings": {
            "iterations": args.iterations,
            "evo_steps": args.evo_steps,
            "evaluation_interval": args.evaluation_interval,
            "prompts_per_iteration_and_agent": PROMPTS_PER_STEP,
            "completions_per_prompt": GROUP_SIZE,
            "questions_to_select_by": args.selection_rows,
            "questions_to_report": args.report_rows,
        },
        "runs": runs,
    }
    (output / "curves.json").write_text(json.dumps(content, indent=1) + "\n")
    plot_curves(runs, args.seeds, output / "curves.png")


def plot_curves(runs: list[dict[str, Any]], seeds: list[int], image: Path) -> None:
    """Accuracy over completions: the mean over seeds, and each seed as a thin line."""
    samples = [point["samples"] / 1000 for point in runs[0]["curve"]]
    each = [lines(runs, seed) for seed in seeds]
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for name, colour in COLOURS.items():
        for of_seed in each:
            axes.plot(samples, of_seed[name], color=colour, alpha=0.3, linewidth=0.8)
        mean = [statistics.mean(values) for values in zip(*(e[name] for e in each), strict=True)]
        axes.plot(samples, mean, color=colour, linewidth=2, label=name)
    axes.set(
        xlabel="completions of the whole population, thousands",
        ylabel="accuracy on held-out questions",
        title=f"spell_backward, 4 agents, seeds {', '.join(map(str, seeds))}",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(image, dpi=120)


if __name__ == "__main__":
    main()
