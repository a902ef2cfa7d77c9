"""Copies of a run's metrics and samples for experiment trackers. They are read from the run directory by a process of
its own, so nothing of a tracker can slow, stop or hang the run. No tensors."""
