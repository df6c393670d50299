#!/usr/bin/env bash
# Starts vLLM servers for agents with VLLMConfig(server_urls=...), one on each GPU, or on a machine without a
# GPU as many as are asked for. Ctrl-C ends all of them.
#
#   bash examples/configs/vllm_servers.sh MODEL [NUMBER]
#
# MODEL is the directory or name of the base model, the same as the trainer's; the servers are at ports 8000,
# 8001, ... Flags after the NUMBER go to vLLM: --max-model-len 4096, --tensor-parallel-size 2, ...
# docs/vllm.md says what the flags below are for.
#
# Environment:
#   PYTHON        of an environment with agilerl and vLLM (python)
#   HOST          address to listen on (127.0.0.1); for trainers on other machines the one they reach
#   PORT          of the first server (8000)
#   VLLM_API_KEY  if it is set, servers ask for it and trainers send it
set -euo pipefail
model=${1:?usage: vllm_servers.sh MODEL [NUMBER] [FLAGS ...]}
gpus=$(nvidia-smi --list-gpus 2> /dev/null | wc -l) || gpus=0
number=${2:-$(( gpus > 0 ? gpus : 1 ))}
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
trap 'trap - EXIT; kill 0' EXIT INT TERM
for (( n = 0; n < number; n++ )); do
    (( gpus == 0 )) || export CUDA_VISIBLE_DEVICES=$n
    "${PYTHON:-python}" -m vllm.entrypoints.openai.api_server --model "$model" \
        --host "${HOST:-127.0.0.1}" --port $(( ${PORT:-8000} + n )) "${flags[@]}" "$@" &
done
wait
