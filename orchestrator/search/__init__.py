"""What to try: grid, random draws, Optuna. Pure values in and out; `make_searcher` chooses by the spec."""

from orchestrator.search.plan import (
    is_upper_bound,
    listed_candidates,
    make_searcher,
    missing_extra,
    plan_count,
    plan_notes,
    search_problems,
)
from orchestrator.search.searcher import Searcher

__all__ = [
    "Searcher",
    "is_upper_bound",
    "listed_candidates",
    "make_searcher",
    "missing_extra",
    "plan_count",
    "plan_notes",
    "search_problems",
]
