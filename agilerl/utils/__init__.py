"""Functions that user code calls around training: saving agents, making populations."""
