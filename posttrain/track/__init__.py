"""Logging of a run's metrics and samples to experiment trackers. No tensors.

A separate process reads them from the run directory, so a tracker cannot slow, stop or hang the run.
"""
