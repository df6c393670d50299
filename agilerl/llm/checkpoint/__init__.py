"""Checkpoints on disk: atomic directories, adapters, the base's weights, optimizer shards."""
