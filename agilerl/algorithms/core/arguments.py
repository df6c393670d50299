"""The constructor arguments of all algorithms: one row each.

A row declares the attribute, with its type, rule and default::

    lr: float = argument(POSITIVE, 5e-7, mutable=True)

:class:`LLMArguments` has the rows of every algorithm,
:class:`~agilerl.algorithms.core.grpo_arguments.GRPOArguments` those of GRPO, GSPO and CISPO. They
decide which values are refused, what a checkpoint holds, what a resumed run takes from it, and what
``hp_config`` may name.

To add an argument to GRPO, edit three places: its row; the parameter of ``GRPO.__init__`` with its
docstring; and the method that builds the record it belongs to (``loss_config``, ``update_config``,
``sampling_config``, ...).

To write another algorithm, subclass ``LLMAlgorithm``, declare the rows of its own arguments, and
pass the constructor's ``locals()`` on. What the constructor leaves out has the row's default. For
``clone`` and ``load`` it must take ``actor_network``, ``index``, ``lora_config``, ``accelerator``,
``device``, ``wrap`` and ``clone``.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from accelerate import Accelerator
from peft import LoraConfig

from agilerl.algorithms.core.argument_rules import (
    check_device,
    check_network,
    check_pad_token_id,
    check_text,
    check_texts,
)
from agilerl.algorithms.core.memory_options import check_memory_options
from agilerl.algorithms.core.registry import HyperparameterConfig, magnitude, with_magnitude
from agilerl.checks import (
    COUNT,
    COUNT_OR_AUTO,
    FLAG,
    OPTIONAL_COUNT,
    InstanceOf,
    Number,
    OneOf,
    require,
    warn,
)
from agilerl.llm.engine.accelerator_config import (
    check_accelerator,
    rank_batch_size,
    rank_micro_batch_size,
    settings_without_effect,
)
from agilerl.llm.generation.vllm.config import VLLMConfig
from agilerl.llm.memory.settings import check_micro_batch_unit
from agilerl.llm.quantization import check_quantization_config

logger = logging.getLogger(__name__)

Rule = Callable[[str, Any], None]

REQUIRED = inspect.Parameter.empty
POSITIVE = Number(0, open_low=True)
VLLM_MAX_TEMPERATURE = 2.0
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True, repr=False)
class Argument:
    """Metadata of one constructor argument."""

    rule: Rule | None
    """Called with name and value; raises for a bad one. None: any value."""
    default: Any = REQUIRED
    saved: bool = True
    """Part of a checkpoint. Not: what belongs to the process that the agent runs in."""
    resumed: bool = True
    """A resumed run takes the checkpoint's value. Not: what the agent was built around and the
    checkpoint must fit, such as its model."""
    mutable: bool = False
    """May be named in ``hp_config``."""

    def __repr__(self) -> str:
        # Short, for help() of an agent's class.
        return "Argument()" if self.default is REQUIRED else f"Argument({self.default!r})"

    def check(self, name: str, value: Any) -> None:
        """Refuse a bad value.

        Raises:
            TypeError: Its type is wrong.
            ValueError: It is out of range.
        """
        if self.rule is not None:
            self.rule(name, value)

    def __get__(self, agent: object, cls: type) -> Argument:
        # Called on an agent only if the instance has no such attribute.
        if agent is not None:
            raise AttributeError(f"{cls.__name__!r} object has no such attribute")
        return self


def argument(
    rule: Rule | None,
    default: Any = REQUIRED,
    *,
    saved: bool = True,
    resumed: bool = True,
    mutable: bool = False,
) -> Any:
    """A row of the table, to be assigned where the attribute is declared; see :class:`Argument`."""
    return Argument(rule, default, saved, resumed, mutable)


class LLMArguments:
    """Arguments of every algorithm that finetunes a language model."""

    pad_token_id: int = argument(check_pad_token_id)
    pad_token: str = argument(
        InstanceOf(
            str,
            "a string: tokenizer.pad_token, or tokenizer.eos_token where the tokenizer has no pad "
            "token",
            optional=False,
        )
    )
    model_name: str | None = argument(check_text, None, resumed=False)
    actor_network: Any = argument(check_network, None, saved=False)
    model_config: dict[str, Any] | None = argument(
        InstanceOf(dict, "a dict of keyword arguments for from_pretrained"), None, resumed=False
    )
    hp_config: HyperparameterConfig | None = argument(
        InstanceOf(HyperparameterConfig, "a HyperparameterConfig"), None
    )
    index: int = argument(Number(0, integer=True), 0, resumed=False)
    batch_size: int = argument(COUNT, 16, mutable=True)
    lr: float = argument(POSITIVE, 5e-7, mutable=True)
    group_size: int = argument(COUNT, 1, mutable=True)
    temperature: float = argument(POSITIVE, 0.9, mutable=True)
    repetition_penalty: float = argument(POSITIVE, 1.0)
    top_p: float = argument(Number(0, 1, open_low=True), 0.95)
    top_k: int | None = argument(Number(0, integer=True, optional=True), 50)
    min_p: float = argument(Number(0, 1), 0.0)
    use_memory_efficient_params: bool = argument(FLAG, True)
    calc_position_embeddings: bool = argument(FLAG, True)
    micro_batch_size_per_gpu: int | Literal["auto"] | None = argument(
        COUNT_OR_AUTO, None, mutable=True
    )
    max_output_tokens: int | None = argument(OPTIONAL_COUNT, None)
    min_output_tokens: int | None = argument(Number(0, integer=True, optional=True), None)
    max_model_len: int | None = argument(Number(2, integer=True, optional=True), 1024)
    hf_generate_chunk_size: int | None = argument(OPTIONAL_COUNT, None)
    stop_sequences: str | Sequence[str] | None = argument(check_texts, None)
    lora_config: LoraConfig | None = argument(
        InstanceOf(LoraConfig, "a peft.LoraConfig"), None, resumed=False
    )
    lora_target_scope: str | None = argument(check_text, None, resumed=False)
    accelerator: Accelerator | None = argument(check_accelerator, None, saved=False)
    device: Any = argument(check_device, "cpu", saved=False)
    wrap: bool = argument(FLAG, True, saved=False)
    # Not stored: `agent.clone` is a method.
    clone: Any = argument(FLAG, False, saved=False)
    use_vllm: bool = argument(FLAG, False, saved=False)
    vllm_config: VLLMConfig | None = argument(
        InstanceOf(VLLMConfig, "an agilerl.utils.algo_utils.VLLMConfig"), None, saved=False
    )
    seed: int = argument(Number(0, 2**63 - 1, integer=True), 42)
    gradient_checkpointing: bool = argument(FLAG, True)
    torch_compiler: str | None = argument(OneOf((None, *COMPILE_MODES)), None, resumed=False)
    use_separate_reference_adapter: bool = argument(FLAG, True, resumed=False)
    reduce_memory_peak: bool = argument(FLAG, False)
    use_fused_linear_logprobs: bool = argument(FLAG, False)
    cast_logprobs_to_fp32: bool = argument(FLAG, True)
    fused_logprobs_chunk_rows: int | None = argument(OPTIONAL_COUNT, None)
    fused_loss_chunk_rows: int | None = argument(OPTIONAL_COUNT, None)
    use_liger_loss: bool = argument(FLAG, False)
    quantization_config: Any = argument(check_quantization_config, None, saved=False)
    activation_offload: bool = argument(FLAG, False)
    use_sequence_packing: bool = argument(FLAG, False)
    micro_batch_tokens: int | None = argument(OPTIONAL_COUNT, None)

    chosen_micro_batch_size: int | None
    """What ``micro_batch_size_per_gpu="auto"`` stands for; None until the first ``learn``."""

    def rank_micro_batch_size(self) -> int:
        """Sequences per forward and backward on this rank; 1 while "auto" is not chosen."""
        size = self.micro_batch_size_per_gpu
        if size == "auto":
            size = self.chosen_micro_batch_size or 1
        return rank_micro_batch_size(self.batch_size, size, self.accelerator)

    def stop_texts(self) -> tuple[str, ...]:
        """``stop_sequences``, also where it is a single one or None."""
        texts = self.stop_sequences
        return (texts,) if isinstance(texts, str) else tuple(texts or ())

    @classmethod
    def argument_table(cls) -> dict[str, Argument]:
        """All rows by name: the class's own and those of its parents."""
        return {
            name: row
            for parent in reversed(cls.__mro__)
            for name, row in vars(parent).items()
            if isinstance(row, Argument)
        }

    @classmethod
    def checked_arguments(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The value of every row.

        Args:
            given: What the constructor was given; its whole ``locals()`` will do.

        Raises:
            TypeError: For a wrong type, or a parameter that has no row.
            ValueError: For a value out of range, or two that contradict each other.
        """
        table = cls.argument_table()
        unknown = given.keys() - table.keys() - {"self", "__class__"}
        require(
            not unknown,
            f"{cls.__name__} takes {', '.join(sorted(unknown))} without declaring it: add "
            "`name: type = argument(rule, default)` to the class",
            TypeError,
        )
        arguments = {name: given.get(name, row.default) for name, row in table.items()}
        # First: values drawn by population are as wrong as the search they are drawn from.
        table["hp_config"].check("hp_config", arguments["hp_config"])
        _check_mutable(arguments["hp_config"], table)
        for name, row in table.items():
            row.check(name, arguments[name])
        cls.check_together(arguments)
        return arguments

    @classmethod
    def check_together(cls, arguments: Mapping[str, Any]) -> None:
        """Refuse values that contradict each other, and say which have no effect.

        Subclasses add what holds of their own arguments.
        """
        require(
            arguments["actor_network"] is not None or arguments["model_name"] is not None,
            "actor_network and model_name are both None; pass actor_network (a causal language "
            "model) or model_name (a name or path to load)",
        )
        check_memory_options(arguments)
        _check_hp_config(arguments, cls.argument_table())
        rank_batch_size(arguments["batch_size"], arguments["accelerator"])
        if arguments["use_vllm"]:
            _check_temperature_of_vllm("temperature", arguments["temperature"])
        least, most = arguments["min_output_tokens"], arguments["max_output_tokens"]
        require(
            least is None or most is None or least <= most,
            f"min_output_tokens is {least}; it must be at most max_output_tokens, which is {most}",
        )
        check_micro_batch_unit(
            arguments["micro_batch_size_per_gpu"], arguments["micro_batch_tokens"]
        )
        ignored = settings_without_effect(arguments["accelerator"])
        if ignored and not arguments["clone"]:
            warn(f"these settings of accelerator have no effect: {'; '.join(ignored)}")
        for name in ("reduce_memory_peak", "use_fused_linear_logprobs"):
            if arguments[name]:
                logger.info(
                    "%s has no effect: log-probs are always computed in memory-bounded tiles", name
                )


def _check_mutable(search: HyperparameterConfig | None, table: Mapping[str, Argument]) -> None:
    """Refuse what cannot be mutated, and an integer that would be mutated to a float."""
    mutable = [name for name, row in table.items() if row.mutable]
    for name, parameter in (search or HyperparameterConfig()).items():
        require(
            name in mutable,
            f"hp_config names {name!r}, which is no hyperparameter that can be mutated; it must be "
            f"one of {', '.join(mutable)}",
        )
        rule = table[name].rule
        require(
            parameter.dtype is int or not (isinstance(rule, Number) and rule.integer),
            f"{name} in hp_config has dtype float, but is an integer; pass "
            "RLParameter(..., dtype=int)",
        )


def check_start(name: str, value: Any) -> None:
    """Refuse to mutate what is chosen by the free memory."""
    require(
        not (isinstance(value, str) and value == "auto"),
        f"hp_config names {name!r}, which is 'auto'; leave it out of hp_config, or pass a number "
        "for mutations to start from",
    )


def _check_hp_config(arguments: Mapping[str, Any], table: Mapping[str, Argument]) -> None:
    """Refuse limits that an argument's own rule refuses."""
    for name, parameter in (arguments["hp_config"] or HyperparameterConfig()).items():
        value, limit_name = arguments[name], f"limit of {name} in hp_config"
        check_start(name, value)
        require(
            isinstance(value, Real | tuple | list),
            f"hp_config names {name!r}, which is {value!r}; it must be a number for "
            "mutations to start from",
        )
        if magnitude(value) == 0 and parameter.min <= 0 and not arguments["clone"]:
            warn(
                f"hp_config names {name!r}, which is {value!r}, and mutations multiply by a "
                "factor, so that it stays 0; start from a number above 0, or give it a limit min "
                "above 0 in hp_config"
            )
        for limit in (parameter.min, parameter.max):
            table[name].check(limit_name, with_magnitude(value, parameter.dtype(limit)))
        if name == "temperature" and arguments["use_vllm"]:
            _check_temperature_of_vllm(limit_name, parameter.max)


def _check_temperature_of_vllm(name: str, value: float) -> None:
    require(
        value <= VLLM_MAX_TEMPERATURE,
        f"{name} is {value}; with use_vllm=True it must be at most {VLLM_MAX_TEMPERATURE}, which "
        "is vLLM's limit",
    )
