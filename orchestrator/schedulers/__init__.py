"""Which trials may go on. Pure: values in, decisions out; no storage, no clock, no cluster."""

from orchestrator.schedulers.make import make_scheduler
from orchestrator.schedulers.scheduler import Scheduler

__all__ = ["Scheduler", "make_scheduler"]
