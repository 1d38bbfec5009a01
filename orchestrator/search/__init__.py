"""What to try: grid, random draws, Optuna. Pure values in and out; `make_searcher` chooses by the spec."""

from orchestrator.search.plan import make_searcher, plan_count, plan_notes
from orchestrator.search.searcher import Searcher

__all__ = ["Searcher", "make_searcher", "plan_count", "plan_notes"]
