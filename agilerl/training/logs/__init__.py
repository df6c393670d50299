"""What a run writes while it goes: metrics, completions, trackers, progress."""
