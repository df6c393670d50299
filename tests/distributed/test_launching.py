"""The accelerator that a script makes, launchers and their configurations, ranks that fail."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.utils import DistributedType
from processes import kill_launcher
from torchrun import HERE, torchrun

from agilerl.utils.llm_utils import create_llm_accelerator

CONFIGS = HERE.parents[1] / "examples" / "configs"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"zero_stage": 4}, ValueError, "zero_stage asks for ZeRO stage 4.*0, 1, 2 or 3"),
        ({"offload_optimizer": True}, ValueError, "offload_optimizer.*None.*1, 2 or 3"),
        ({"zero_stage": 0, "offload_optimizer": True}, ValueError, "offload.*0; it must be 1, 2"),
    ],
)
def test_bad_arguments_are_named(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        create_llm_accelerator(**arguments)


def test_a_single_process_needs_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert create_llm_accelerator() is None
    assert create_llm_accelerator(zero_stage=2, offload_optimizer=True) is None


@pytest.mark.process
def test_a_rank_that_dies_or_hangs_does_not_hang_the_test(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '1': raise SystemExit(3)\ntime.sleep(999)"
    )
    with pytest.raises(RuntimeError, match="rank failed"):
        torchrun(script, seconds=300)
    script.write_text("import time\nprint('waiting', flush=True)\ntime.sleep(999)")
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="not done after 8 s"):
        torchrun(script, seconds=8)
    assert time.monotonic() - start < 120


@pytest.mark.process
def test_a_rank_with_an_error_does_not_try_to_part_from_the_others(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import atexit, time, torch\n"
        "from agilerl.utils.llm_utils import create_llm_accelerator\n"
        "group = torch.distributed.is_initialized\n"
        "atexit.register(lambda: print(f'group at exit: {group()}'))\n"
        "if create_llm_accelerator(cpu=True).process_index == 1:\n"
        "    raise RuntimeError\n"
        # Longer than the limit: whoever waits for this rank fails the test.
        "time.sleep(999)\n"
    )
    with pytest.raises(RuntimeError, match="group at exit: True"):
        torchrun(script, seconds=300)


@pytest.mark.process
def test_a_rank_that_leaves_a_run_by_sys_exit_does_not_part_from_the_others(tmp_path: Path) -> None:
    """They would fail while it is still ending, and the launcher could name one of them."""
    script = tmp_path / "leaves.py"
    script.write_text(
        "import atexit, sys, torch\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        "from pathlib import Path\n"
        "from training_runs import RANK, reasoning\n"
        "from agilerl.utils.llm_utils import create_llm_accelerator\n"
        "group = torch.distributed.is_initialized\n"
        "atexit.register(lambda: print(f'group of {RANK} at exit: {group()}\\n', end=''))\n"
        "def hook(iteration):\n"
        "    if RANK == 1 and iteration == 2:\n"
        "        sys.exit(3)\n"
        f"run = Path({str(tmp_path / 'run')!r})\n"
        "reasoning(run, create_llm_accelerator(cpu=True), hook=hook)\n"
    )
    with pytest.raises(RuntimeError, match="group of 1 at exit: True") as caught:
        torchrun(script, seconds=200)
    assert "exitcode  : 3" in str(caught.value)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_launch_configurations_are_read_by_accelerate(path: Path) -> None:
    config = load_config_from_file(str(path))
    assert isinstance(config, ClusterConfig)
    several = path.stem.endswith("two_nodes")
    assert (config.num_machines, config.num_processes) == ((2, 16) if several else (1, 8))
    assert f"accelerate launch --config_file examples/configs/{path.name} " in path.read_text()
    kind = path.stem.removesuffix("_two_nodes")
    if kind == "ddp":
        assert config.distributed_type == DistributedType.MULTI_GPU
        return
    assert config.distributed_type == DistributedType.DEEPSPEED
    settings = config.deepspeed_config
    assert kind == f"zero{settings['zero_stage']}"
    assert "create_llm_accelerator() in train.py, which takes the stage" in path.read_text()
    # Otherwise DeepSpeed's launcher asks for pdsh and a list of hosts.
    assert settings.get("deepspeed_multinode_launcher") == ("standard" if several else None)
    # Models are partitioned by the agents, not by transformers as they are made.
    assert settings.get("zero3_init_flag") == (False if kind == "zero3" else None)


@pytest.mark.process
def test_the_stage_is_that_of_the_launch_configuration_unless_given(tmp_path: Path) -> None:
    script = tmp_path / "stages.py"
    script.write_text(
        "import atexit\n"
        "import torch.distributed\n"
        "from accelerate.state import AcceleratorState\n"
        "from transformers.integrations import is_deepspeed_zero3_enabled\n"
        "from agilerl.utils.llm_utils import create_llm_accelerator\n"
        # What is registered first is run last.
        "group = torch.distributed.is_initialized\n"
        "atexit.register(lambda: print(f'group at exit: {group()}\\n', end=''))\n"
        "for stage in ({'gather_for_generation': False}, {'zero_stage': 1}):\n"
        "    AcceleratorState._reset_state(reset_partial_state=True)\n"
        "    accelerator = create_llm_accelerator(**stage)\n"
        "    plugin = accelerator.deepspeed_plugin\n"
        "    stage = plugin.deepspeed_config['zero_optimization']['stage']\n"
        "    zero3 = is_deepspeed_zero3_enabled()\n"
        # One write: the workers' output is unbuffered, and goes to one pipe.
        "    print(f'found {stage} {accelerator.num_processes} {zero3}\\n', end='')\n"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
    command += ["--config_file", str(CONFIGS / "zero3.yaml"), str(script)]
    process = subprocess.Popen(
        command,
        env=os.environ
        | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        | {"PYTHONPATH": str(CONFIGS.parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said, errors = process.communicate(timeout=300)
    finally:
        kill_launcher(process)
    assert process.returncode == 0, errors
    assert said.count("found 3 2 False") == said.count("found 1 2 False") == 2
    assert said.count("group at exit: False") == 2


def port_for_later() -> int:
    """A free port that the kernel gives to nobody who asks it for any: a launcher takes seconds."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    text = given.read_text() if given.exists() else "49152 65535"
    first, last = map(int, text.split())
    outside = [*range(5000, first), *range(last + 1, 2**16)] or range(5000, 2**16)
    # The global stream, once seeded, would give suites that run at the same time the same ports.
    for port in random.SystemRandom().sample(outside, 20):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("", port))
            return port
    raise RuntimeError(f"20 ports outside of {first} to {last} are taken")


def two_machines(launcher: str, port: int) -> list[list[str]]:
    """The commands of docs/distributed.md, with a process each, on two machines that are one."""
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        command += ["--nproc_per_node", "1", "--rdzv_backend", "c10d"]
        return [[*command, "--rdzv_endpoint", f"127.0.0.1:{port}"]] * 2
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
    command += ["--config_file", str(CONFIGS / "ddp_two_nodes.yaml")]
    command += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    return [[*command, "--machine_rank", machine] for machine in "01"]


@pytest.mark.process
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate launch"])
def test_two_machines_find_each_other(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "hello.py"
    script.write_text(
        "import os\nprint('rank {RANK} of {WORLD_SIZE}\\n'.format(**os.environ), end='')\n"
    )
    port = port_for_later()
    machines = [
        subprocess.Popen(
            [*command, str(script)],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in two_machines(launcher, port)
    ]
    try:
        said = "".join(machine.communicate(timeout=300)[0] for machine in machines)
    finally:
        for machine in machines:
            kill_launcher(machine)
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert "rank 0 of 2" in said and "rank 1 of 2" in said
