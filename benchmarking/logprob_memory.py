"""Memory and time of log-probs and their gradient for several vocabularies and lengths.

Every side computes log-probs and entropies from the same hidden states with the same frozen head,
and the gradient of the hidden states. Memory is measured in a process of each side's own, in which
glibc returns freed blocks to the system at once. CPU seconds are measured in one process, where the
sides take turns.

* ``agilerl``: this library's tiles of logits (``agilerl/llm/logprobs.py``)
* ``trl``: the head that TRL's trainer adds to the model
* ``trl, selective_log_softmax``: that function of TRL's on the model's logits, without entropies
* ``plain``: ``log_softmax`` of the logits

    .venv/bin/python benchmarking/logprob_memory.py --out build/logprob-memory.json
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
from alternating import in_a_process
from measure import MemoryPeak, freed_blocks_returned
from report import benchmark_parser, count, run_workloads

if TYPE_CHECKING:
    import torch
    from transformers import Qwen2ForCausalLM

VOCABULARIES = (8192, 32768, 65536, 151936)
LENGTHS = (256, 1024, 4096)
SIDES = ("agilerl", "trl", "trl, selective_log_softmax", "plain")
WARMUP_TOKENS = 16
LARGE = 2**29
"""Bytes of logits."""
COPIES_OF_LOGITS = 5
"""Sides that make all logits are skipped if so many tensors of that size do not fit in memory."""


@dataclass(frozen=True)
class Case:
    """One head and a number of tokens."""

    vocab_size: int
    tokens: int
    hidden_size: int = 256
    temperature: float = 0.9
    seed: int = 0

    @property
    def bytes_of_logits(self) -> int:
        """In float32."""
        return 4 * self.tokens * self.vocab_size

    @property
    def rounds(self) -> int:
        """Timed passes of each side; few where they take long."""
        return 2 if self.bytes_of_logits > LARGE else 7


class Pass:
    """Forward and backward of one side on a case.

    Args:
        side: Out of :data:`SIDES`.
        case: The head and the tokens.
    """

    def __init__(self, side: str, case: Case) -> None:
        import torch

        generator = torch.Generator().manual_seed(case.seed)
        self.hidden = torch.randn(1, case.tokens + 1, case.hidden_size, generator=generator)
        self.ids = torch.randint(case.vocab_size, (1, case.tokens + 1), generator=generator)
        self._logprobs = make_side(side, headless_model(case), case)
        self.run(WARMUP_TOKENS)  # libraries allocate buffers on first use

    def run(self, tokens: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the first tokens, by default of all, and the gradient of hidden states."""
        stop = None if tokens is None else tokens + 1
        leaf = self.hidden[:, :stop].detach().requires_grad_()
        logp = self._logprobs(leaf, self.ids[:, :stop])
        logp.sum().backward()
        assert leaf.grad is not None
        return logp.detach(), leaf.grad


def memory(side: str, case: Case, threads: int) -> dict[str, Any]:
    """Memory that one pass adds to this process, and what came out.

    Returns:
        ``memory_bytes``, and sums by which sides can be compared.
    """
    import torch

    torch.set_num_threads(threads)
    measured = Pass(side, case)
    peak = MemoryPeak()
    logp, gradient = measured.run()
    return {
        "memory_bytes": peak.read(),
        "logp_mean": logp.double().mean().item(),
        "gradient_norm": gradient.double().norm().item(),
    }


def seconds(sides: Sequence[str], case: Case, threads: int) -> dict[str, list[float]]:
    """CPU seconds of every pass of each side, in turn, in this process."""
    import torch

    torch.set_num_threads(threads)
    passes = {side: Pass(side, case) for side in sides}
    found: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(case.rounds):
        for side, timed in passes.items():
            start = time.process_time()
            timed.run()
            found[side].append(time.process_time() - start)
    return found


def headless_model(case: Case) -> Qwen2ForCausalLM:
    """A model without layers, frozen: hidden states are its normalized input embeddings."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=case.vocab_size,
        hidden_size=case.hidden_size,
        num_hidden_layers=0,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    torch.manual_seed(case.seed)
    return Qwen2ForCausalLM(config).requires_grad_(False).eval()


def make_side(
    side: str, model: Qwen2ForCausalLM, case: Case
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Make a function from embeddings ``(1, N + 1, D)`` and ids ``(1, N + 1)`` to ``(N,)``."""
    if side == "agilerl":
        from agilerl.llm.causal_lm import find_head
        from agilerl.llm.logprobs import token_logprobs

        head = find_head(model)

        def ours(embeddings: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            hidden = model.model(inputs_embeds=embeddings).last_hidden_state[0, :-1]
            return token_logprobs(hidden, ids[0, 1:], head, temperature=case.temperature).logp

        return ours
    if side == "trl":
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model, temperature=case.temperature, outputs=("log_probs", "entropy"))

        def fused(embeddings: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            output = model(inputs_embeds=embeddings, labels=ids, fused_lm_head=True)
            return output.log_probs[0, 1 - ids.shape[1] :]

        return fused
    reduce = partial(_plain_logprobs, temperature=case.temperature)
    if side != "plain":
        from trl.trainer.utils import selective_log_softmax

        reduce = partial(selective_log_softmax, temperature=case.temperature)

    def on_logits(embeddings: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        logits = model(inputs_embeds=embeddings).logits[:, :-1]
        return reduce(logits, ids[:, 1:])[0]

    return on_logits


def _plain_logprobs(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    import torch

    log_softmax = (logits / temperature).log_softmax(-1)
    with torch.no_grad():
        (log_softmax.exp() * log_softmax).sum(-1)  # entropies, as the others have them
    return log_softmax.gather(-1, ids[..., None])[..., 0]


def run_case(case: Case, sides: Sequence[str], threads: int) -> dict[str, Any]:
    """Measure every side on a case, and check that they agree.

    Returns:
        Settings, figures by side (a side that does not fit the machine says so), ratios to ours.

    Raises:
        RuntimeError: Log-probs or gradients of two sides differ.
    """
    wanted = COPIES_OF_LOGITS * case.bytes_of_logits
    found: dict[str, dict[str, Any]] = {}
    for side in sides:
        tiled = side in ("agilerl", "trl")
        if not tiled and wanted > psutil.virtual_memory().available:
            found[side] = {"skipped": f"{wanted / 1e9:.0f} GB were not free"}
            continue
        with freed_blocks_returned():
            found[side] = in_a_process(memory, side, case, threads)
        print(f"  {side}: {found[side]['memory_bytes']['added'] / 1e6:.0f} MB", flush=True)
    measured = {side: figures for side, figures in found.items() if "skipped" not in figures}
    _check_equal(measured)
    for side, timed in in_a_process(seconds, [*measured], case, threads).items():
        measured[side] |= {"median_seconds": statistics.median(timed), "seconds": timed}
    ours = measured["agilerl"]
    ratios = {
        side: {
            "memory": ours["memory_bytes"]["added"] / figures["memory_bytes"]["added"],
            "seconds": ours["median_seconds"] / figures["median_seconds"],
        }
        for side, figures in measured.items()
    }
    return {
        "settings": asdict(case),
        "bytes_of_logits": case.bytes_of_logits,
        "sides": found,
        "ratio": ratios,
    }


def _check_equal(measured: dict[str, dict[str, Any]]) -> None:
    ours = measured["agilerl"]
    for side, figures in measured.items():
        for key in ("logp_mean", "gradient_norm"):
            if abs(figures[key] - ours[key]) > 1e-4 * abs(ours[key]):
                raise RuntimeError(f"{key} is {ours[key]} here and {figures[key]} of {side}")


def print_summary(name: str, result: dict[str, Any]) -> None:
    """Print a line per side."""
    print(f"{name}: logits would take {result['bytes_of_logits'] / 1e6:.0f} MB")
    for side, figures in result["sides"].items():
        if "skipped" in figures:
            print(f"  {side:27} not run: {figures['skipped']}")
            continue
        added = figures["memory_bytes"]["added"] / 1e6
        print(f"  {side:27} {added:6.0f} MB, {figures['median_seconds']:.2f} s")


def main() -> None:
    """Measure all cases, print and write the result."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--vocabularies", type=count, nargs="+", default=VOCABULARIES)
    parser.add_argument("--lengths", type=count, nargs="+", default=LENGTHS, help="tokens")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(given.threads)  # read when the children load torch
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sides = ["agilerl", *(side for side in given.sides if side != "agilerl")]
    cases = {
        f"{vocabulary} x {length}": Case(vocabulary, length)
        for vocabulary in given.vocabularies
        for length in given.lengths
    }
    if given.quick:
        sides = [side for side in sides if not side.startswith("trl")]
        cases = {"512 x 64": replace(Case(512, 64), hidden_size=32)}

    def run(name: str) -> dict[str, Any]:
        return run_case(cases[name], sides, given.threads)

    run_workloads(cases, run, print_summary, given.threads, given.out)


if __name__ == "__main__":
    main()
