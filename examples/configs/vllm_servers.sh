#!/usr/bin/env bash
# Starts vLLM servers for agents with VLLMConfig(server_urls=...), one on each GPU that is visible, or on a machine
# without a GPU as many as are asked for. Ctrl-C ends all of them.
#
#   bash examples/configs/vllm_servers.sh MODEL [NUMBER]
#
# MODEL is the directory or name of the base model, the same as the trainer's; the servers are at ports 8000,
# 8001, ... Flags after the NUMBER go to vLLM, such as --max-model-len 4096.
# docs/vllm.md says what the flags below are for.
#
# Environment:
#   PYTHON        of an environment with agilerl and vLLM (python)
#   HOST          address to listen on (127.0.0.1); for trainers on other machines the one they reach
#   PORT          of the first server (8000)
#   GPUS          of each server (1); more than one also need --tensor-parallel-size
#   VLLM_API_KEY  if it is set, servers ask for it and trainers send it
set -euo pipefail
model=${1:?usage: vllm_servers.sh MODEL [NUMBER] [FLAGS ...]}
gpus=$(nvidia-smi --list-gpus 2> /dev/null | wc -l) || gpus=0
IFS=, read -r -a visible <<< "${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $(( gpus - 1 )))}"
each=${GPUS:-1}
number=${2:-$(( gpus > 0 ? ${#visible[@]} / each : 1 ))}
shift $(( $# > 1 ? 2 : 1 ))

flags=(
    --enable-lora
    --max-lora-rank 32  # at least lora_config.r
    --max-loras 8       # adapters in one batch: agents of the population times training processes
    --generation-config vllm
    --worker-extension-cls agilerl.llm.generation.vllm.sampler_extension.TrainerLogprobs
    --enable-prefix-caching
)
if (( gpus == 0 )); then
    export VLLM_CPU_OMP_THREADS_BIND=nobind
    flags+=(--dtype float32 --enforce-eager --no-enable-chunked-prefill --block-size 32 --kv-cache-memory-bytes 1073741824)
fi

export VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
started=()
# Each server is a process group of its own, with its engine.
trap 'trap - EXIT; for pid in "${started[@]}"; do kill -- "-$pid" 2> /dev/null || true; done' EXIT INT TERM
for (( n = 0; n < number; n++ )); do
    if (( gpus > 0 )); then
        own=("${visible[@]:n * each:each}")
        export CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${own[*]}")
    fi
    setsid "${PYTHON:-python}" -m vllm.entrypoints.openai.api_server --model "$model" \
        --host "${HOST:-127.0.0.1}" --port $(( ${PORT:-8000} + n )) "${flags[@]}" "$@" &
    started+=($!)
done
wait
