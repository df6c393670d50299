"""What importing loads, and what it must not."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "peft", "datasets", "accelerate", "numpy")
OPTIONAL = ("vllm", "deepspeed", "liger_kernel", "bitsandbytes", "wandb", "gem", "gymnasium")


def run(code: str, *flags: str) -> None:
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_import_agilerl_loads_no_torch() -> None:
    run(f"import agilerl, sys; assert not set({HEAVY}) & set(sys.modules), sys.modules.keys()")


@pytest.mark.parametrize(
    "statement",
    ["from agilerl.algorithms import GRPO, GSPO, CISPO", "import agilerl.training.train_llm"],
)
def test_imports_need_no_optional_package_and_warn_about_nothing(statement: str) -> None:
    # None in sys.modules makes an import fail, as if the package were not installed. Only what
    # this package warns about counts: the filter names its modules.
    run(
        f"import sys, warnings\n"
        f"for name in {OPTIONAL}: sys.modules[name] = None\n"
        f"with warnings.catch_warnings(record=True) as caught:\n"
        f"    warnings.simplefilter('always')\n"
        f"    {statement}\n"
        f"own = [str(w) for w in caught if 'agilerl' in w.filename]\n"
        f"assert not own, own\n"
    )
