"""The functional core, one module per arrow of the pipeline.

prompts -> generation -> (rewards) -> advantages -> forward + logprobs -> losses -> update, with
policy and adapters holding the weights and checkpoint putting them on disk. Nothing here imports
agents, environments or training loops.
"""
