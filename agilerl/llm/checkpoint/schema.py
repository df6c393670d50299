"""What each file of a checkpoint holds, and the one check of everything that is read from disk.

A checkpoint may be damaged, or made by someone who wants to run code on the reader's machine. So
files are read without executing anything, their content is compared with the tables below, and only
what a table lists is passed on to other libraries.
"""

# No postponed annotations here: TypedDict would not see NotRequired.
import contextlib
import math
import pickle
import reprlib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NoReturn,
    NotRequired,
    TypedDict,
    Union,
    get_args,
    get_origin,
    is_typeddict,
)

import torch

FORMAT = 1
Count = Annotated[int, (1).__le__, "an integer of at least 1"]
Index = Annotated[int, (0).__le__, "an integer of at least 0"]
Role = Annotated[str, str.isidentifier, "the name of a role"]
Names = str | list[str] | None


def _is_step(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0 and tensor.dtype == torch.float32 and 0 <= tensor.item() < 2**31


Rate = Annotated[float, lambda rate: 0 <= rate < math.inf, "a learning rate"]


class _ParameterGroup(TypedDict):
    params: list[int]
    lr: Rate
    initial_lr: NotRequired[Rate]


class AdamWMoments(TypedDict):
    """The state of one parameter, whole or in a shard."""

    step: Annotated[torch.Tensor, _is_step, "a count of steps"]
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


class _AdamWState(TypedDict):
    state: dict[int, AdamWMoments]
    param_groups: list[_ParameterGroup]  # of other options the agent's own are kept


class EngineState(TypedDict):
    """Optimizer and schedule, as an engine's ``state_dict()`` gives them."""

    optimizer: _AdamWState
    scheduler: dict[str, Any] | None
    lr: NotRequired[Rate | list[Rate]]


class _History(TypedDict):
    index: int
    fitness: list[float]
    scores: list[float]
    steps: list[int]
    reference_update_tracker: int
    mut: Any


class Attributes(TypedDict):
    """``attributes.pt``; arguments are checked one by one as the agent's constructor does."""

    format: Literal[1]
    algo: str
    arguments: dict[str, Any]
    history: _History
    rng_state: torch.Tensor
    rng_states: NotRequired[list[torch.Tensor]]
    bad_steps: NotRequired[int]
    lora_only: bool
    roles: Annotated[list[Role], lambda roles: "actor" in roles, "names of roles with 'actor'"]
    base_name: NotRequired[str | None]
    base_dtype: NotRequired[dict[str, str]]
    base_fingerprint: NotRequired[str]
    optimizer: NotRequired[Any]  # EngineState, which is checked if it is wanted
    optimizer_shards: NotRequired[Any]  # Count, likewise


class FullActorAttributes(Attributes):
    """``attributes.pt`` with the full actor in it; the two configs are JSON."""

    actor_state_dict: dict[str, torch.Tensor]
    adapter_state_dicts: dict[Role, dict[str, torch.Tensor]]
    lora_configs: NotRequired[dict[Role, Any]]
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


class BaseLoading(TypedDict):
    """``model_config`` among the arguments: what a checkpoint may say about loading its base."""

    dtype: NotRequired[torch.dtype | str | None]
    torch_dtype: NotRequired[torch.dtype | str | None]
    revision: NotRequired[str | None]
    subfolder: NotRequired[str]
    variant: NotRequired[str | None]
    attn_implementation: NotRequired[
        Literal["eager", "sdpa", "flash_attention_2", "flex_attention", None]
    ]
    use_safetensors: NotRequired[Literal[True, None]]
    trust_remote_code: NotRequired[Literal[False, None]]
    weights_only: NotRequired[Literal[True]]


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


def check(file: Path, value: Any, expected: Any, field: str = "content") -> None:
    """Raise DamagedCheckpointError, naming the innermost field that is not of the expected type.

    Expected is a class, a TypedDict, or what ``typing`` makes of these; ``Annotated`` with a
    predicate and its description.
    """
    reason = mismatch(value, expected, field)
    if reason is not None:
        damaged(file, reason)


def mismatch(value: Any, expected: Any, field: str = "content") -> str | None:
    """Why a value is not of the expected type; None if it is."""
    origin, arguments = get_origin(expected), get_args(expected)
    name = getattr(expected, "__name__", str(expected))
    if origin is NotRequired:
        return mismatch(value, arguments[0], field)
    if origin is Annotated:
        _, predicate, name = arguments
        fits = mismatch(value, arguments[0]) is None and predicate(value)
    elif origin in (Union, types.UnionType):
        fits = any(mismatch(value, each) is None for each in arguments)
    elif origin is Literal:
        fits = any(type(value) is type(each) and value == each for each in arguments)
    elif isinstance(value, bool):
        fits = expected in (bool, Any)
    else:
        kinds = {Any: object, float: int | float}
        plain = dict if is_typeddict(expected) else origin or expected
        fits = isinstance(value, kinds.get(plain, plain))
        fits = fits and (expected is not torch.Tensor or _is_stored(value))
    if not fits:
        plain = value is None or isinstance(value, bool | int | float | str)
        return (
            f"its {field} is {reprlib.repr(value) if plain else type(value).__name__}, not {name}"
        )
    return next(filter(None, _inner_mismatches(value, expected, field)), None)


def _inner_mismatches(value: Any, expected: Any, field: str) -> Iterator[str | None]:
    """:func:`mismatch` of what is in a container."""
    origin, arguments = get_origin(expected), get_args(expected)
    if is_typeddict(expected):
        prefix = "" if field == "content" else f"{field}."
        for name in sorted(expected.__required_keys__ - value.keys()):
            yield f"its {prefix}{name} is missing"
        for name, kind in expected.__annotations__.items():
            yield mismatch(value[name], kind, prefix + name) if name in value else None
    elif origin is dict:
        for key, item in value.items():
            yield mismatch(key, arguments[0], f"key of {field}")
            yield mismatch(item, arguments[1], f"{field}[{key!r}]")
    elif origin is list:
        for number, item in enumerate(value):
            yield mismatch(item, arguments[0], f"{field}[{number}]")


def _is_stored(tensor: torch.Tensor) -> bool:
    """Whether the file held every element, as it does not of an expanded or a sparse tensor."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()
