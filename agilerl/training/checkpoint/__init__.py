"""Saving a run and going on with it: run directories, run checkpoints, the elite."""
