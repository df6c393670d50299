"""What each file of a checkpoint holds, and the one check of everything that is read from disk.

A checkpoint may be damaged, or made by someone who wants to run code on the reader's machine. So
files are read without executing anything, their content is compared with the tables below, and only
what a table lists is passed on to other libraries.
"""

# No postponed annotations here: TypedDict would not see NotRequired.
import contextlib
import functools
import pickle
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, NotRequired

import pydantic
import torch
from annotated_types import Predicate
from typing_extensions import TypedDict  # pydantic's condition before Python 3.12

FORMAT = 2


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    # An expanded or a sparse tensor of any size fits into a small file.
    stored = tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not stored or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ValueError("the file does not hold every element")
    return tensor


def _is_step(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0 and tensor.dtype == torch.float32 and 0 <= tensor.item() < 2**31


Count = Annotated[int, pydantic.Field(ge=1)]
Index = Annotated[int, pydantic.Field(ge=0)]
Role = Annotated[str, Predicate(str.isidentifier)]
Names = str | list[str] | None
Rate = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
Tensor = Annotated[pydantic.InstanceOf[torch.Tensor], pydantic.AfterValidator(_stored)]
_StateValue = Tensor | bool | int | float | str | None
DType = pydantic.InstanceOf[torch.dtype]


class _ParameterGroup(TypedDict):
    params: list[int]
    lr: Rate
    initial_lr: NotRequired[Rate]


class AdamWMoments(TypedDict):
    """The state of one parameter, whole or in a shard."""

    step: Annotated[Tensor, Predicate(_is_step)]
    exp_avg: Tensor
    exp_avg_sq: Tensor


class _AdamWState(TypedDict):
    state: dict[int, AdamWMoments]
    param_groups: list[_ParameterGroup]  # of other options the agent's own are kept


class _OtherState(TypedDict):
    state: dict[int, dict[str, _StateValue | dict[str, _StateValue]]]
    param_groups: list[_ParameterGroup]  # of which numbers are taken


class _Schedule(TypedDict):
    scheduler: dict[str, Any] | None
    lr: NotRequired[Rate | list[Rate]]


class EngineState(_Schedule):
    """AdamW and schedule, as an engine's ``state_dict()`` gives them."""

    optimizer: _AdamWState


class OtherEngineState(_Schedule):
    """The same of another optimizer."""

    optimizer: _OtherState
    kind: str


class _History(TypedDict):
    index: int
    fitness: list[float]
    scores: list[float]
    steps: list[int]
    total_steps: NotRequired[int]  # not in checkpoints from before there was one
    reference_update_tracker: int
    mut: Any
    chosen_micro_batch_size: NotRequired[Count | None]  # not in those from before it


class Attributes(TypedDict):
    """``attributes.pt``; arguments are checked one by one as the agent's constructor does."""

    format: Literal[2]  # FORMAT
    algo: str
    arguments: dict[str, Any]
    history: _History
    rng_states: Annotated[list[Tensor], pydantic.Field(min_length=1)]  # by rank
    bad_steps: int
    lora_only: bool
    roles: Annotated[list[Role], Predicate(lambda roles: "actor" in roles)]
    base_name: str | None
    base_dtype: dict[str, str]
    base_fingerprint: str
    base_quantization: NotRequired[Any]  # Quantization, which is checked if it is wanted
    optimizer: NotRequired[Any]  # EngineState, which is checked if it is wanted
    optimizer_shards: NotRequired[Any]  # Count, likewise


class FullActorAttributes(Attributes):
    """``attributes.pt`` with the full actor in it; the two configs are JSON."""

    actor_state_dict: dict[str, Tensor]
    adapter_state_dicts: dict[Role, dict[str, Tensor]]
    lora_configs: dict[Role, Any]
    model_config: str
    generation_config: str


class ModelConfig(TypedDict):
    """``model_config`` of a full actor, of which the model checks the rest."""

    model_type: str


class AdapterConfig(TypedDict):
    """``adapter_config.json``, and ``lora_config`` among the arguments: what is taken over.

    Not here: what initialises an adapter (files of CorDA, EVA), names modules to import (Megatron)
    or makes the adapter something else (other variants of LoRA).
    """

    peft_type: Literal["LORA"]
    r: Count
    task_type: NotRequired[str | None]
    lora_alpha: NotRequired[float]
    lora_dropout: NotRequired[float]
    target_modules: NotRequired[Names]
    exclude_modules: NotRequired[Names]
    modules_to_save: NotRequired[list[str] | None]
    target_parameters: NotRequired[list[str] | None]
    layers_to_transform: NotRequired[int | list[int] | None]
    layers_pattern: NotRequired[Names]
    rank_pattern: NotRequired[dict[str, Count] | None]
    alpha_pattern: NotRequired[dict[str, float] | None]
    bias: NotRequired[Literal["none", "all", "lora_only"]]
    lora_bias: NotRequired[bool]
    use_rslora: NotRequired[bool]
    use_dora: NotRequired[bool]
    fan_in_fan_out: NotRequired[bool]
    init_lora_weights: NotRequired[bool | str | None]
    inference_mode: NotRequired[bool]
    ensure_weight_tying: NotRequired[bool]
    trainable_token_indices: NotRequired[list[int] | dict[str, list[int]] | None]
    alora_invocation_tokens: NotRequired[list[int] | None]


ORIGIN_FIELDS = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "loftq_config",
    "lora_ga_config", "peft_version", "revision", "runtime_config",
}  # fmt: skip
"""Fields of ``adapter_config.json`` that are ignored: where an adapter came from."""


@pydantic.with_config(pydantic.ConfigDict(extra="forbid"))
class BaseLoading(TypedDict):
    """``model_config`` among the arguments: what a checkpoint may say about loading its base."""

    dtype: NotRequired[DType | str | None]
    torch_dtype: NotRequired[DType | str | None]
    revision: NotRequired[str | None]
    subfolder: NotRequired[str]
    variant: NotRequired[str | None]
    attn_implementation: NotRequired[
        Literal["eager", "sdpa", "flash_attention_2", "flex_attention", None]
    ]
    use_safetensors: NotRequired[Literal[True, None]]
    trust_remote_code: NotRequired[Literal[False, None]]
    weights_only: NotRequired[Literal[True]]


_DTypeName = Literal["float16", "bfloat16", "float32", "float64", "uint8", "int8"]


@pydantic.with_config(pydantic.ConfigDict(extra="forbid"))
class Quantization(TypedDict):
    """``base_quantization``: arguments of ``BitsAndBytesConfig``."""

    load_in_4bit: NotRequired[bool]
    load_in_8bit: NotRequired[bool]
    llm_int8_threshold: NotRequired[float]
    llm_int8_skip_modules: NotRequired[list[str] | None]
    llm_int8_enable_fp32_cpu_offload: NotRequired[bool]
    llm_int8_has_fp16_weight: NotRequired[bool]
    bnb_4bit_compute_dtype: NotRequired[_DTypeName]
    bnb_4bit_quant_type: NotRequired[Literal["nf4", "fp4"]]
    bnb_4bit_use_double_quant: NotRequired[bool]
    bnb_4bit_quant_storage: NotRequired[_DTypeName]


class FragmentHeader(TypedDict):
    """Header of an optimizer's shard: where the elements of one parameter belong."""

    shape: list[Index]
    start: Index


class DamagedCheckpointError(ValueError):
    """A checkpoint's file is missing, or its content is not what was written."""


def damaged(file: Path, reason: str) -> NoReturn:
    """Raise DamagedCheckpointError naming the file, the reason and the remedy."""
    raise DamagedCheckpointError(f"{file} is damaged: {reason}; use another checkpoint")


@contextlib.contextmanager
def reading(file: Path, what: str = "it cannot be read") -> Iterator[None]:
    """Within it whatever a library runs into means that a file is damaged.

    Raises:
        DamagedCheckpointError: For every error but that of a missing file.
    """
    try:
        yield
    except (FileNotFoundError, DamagedCheckpointError):
        raise
    except Exception as error:
        reason = f"is damaged: {what} ({error!r})"
        if isinstance(error, pickle.UnpicklingError):  # whose message advises to load unsafely
            reason = "cannot be loaded safely: it is truncated, damaged, or holds pickled code"
        raise DamagedCheckpointError(f"{file} {reason}; use another checkpoint") from error


def check(file: Path, value: Any, expected: Any, field: str = "") -> None:
    """Raise DamagedCheckpointError, naming the first field that is not of the expected type."""
    if found := mismatches(value, expected):
        path, reason = next(iter(found.items()))
        damaged(file, f"its {'.'.join(map(str, (field, *path))).strip('.') or 'content'}: {reason}")


def mismatches(value: Any, expected: Any) -> dict[tuple[int | str, ...], str]:
    """By the path in ``value``, why what is there is not of the expected type."""
    try:
        _adapter(expected).validate_python(value, strict=True)
    except pydantic.ValidationError as error:
        return {e["loc"]: f"{e['msg']} (found {reprlib.repr(e['input'])})" for e in error.errors()}
    return {}


# Making one takes milliseconds.
_adapter = functools.cache(pydantic.TypeAdapter[Any])
