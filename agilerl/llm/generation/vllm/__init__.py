"""Generation by vLLM: in an engine process beside the trainer, or on servers.

Nothing here imports vllm but :mod:`.engine_process`, :mod:`.sampler_extension` and
:mod:`.cpu_lora`, which run in vLLM's own processes.
"""
