"""Runs trials: in this process (`inline`) or on Ray Tune workers (`ray_tune`). Decides nothing about what to try."""
