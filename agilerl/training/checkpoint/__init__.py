"""Saving and resuming runs: run directories, run checkpoints, the elite."""
