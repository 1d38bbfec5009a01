"""A sweep before it runs: what was asked for, what it would cost, what it could tell. Starts no sweep."""

from orchestrator.planning.request import SweepRequest, read_spec, read_spec_or_workload

__all__ = ["SweepRequest", "read_spec", "read_spec_or_workload"]
