"""Generation by vLLM: in an engine process beside the trainer, or on servers.

Nothing in this package imports vllm but :mod:`.engine_process` and :mod:`.sampler_extension`, which
run in processes of their own.
"""
