"""Probes: they watch a training loop, change nothing in it, and say what they saw as findings."""
