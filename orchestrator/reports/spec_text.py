"""The resolved spec that a sweep was stored with, as a sweep file."""

from __future__ import annotations

from orchestrator.reports.source import Query, sweep_facts


def spec_text(query: Query, sweep: str) -> str:
    """YAML that can be run again; of a sweep from before specs were stored so, its file and what `--set` changed."""
    sweep_facts(query, sweep)  # an unknown name is told with the nearest
    _, [(document,)] = query("select spec from orch.sweeps where sweep = %s", (sweep,))
    if "resolved" in document:
        return str(document["resolved"])
    source = document["source"]
    return "".join([source["text"].rstrip("\n"), "\n", *(f"# --set {one}\n" for one in source["set"])])
