"""The sweep file: text to frozen values, with every mistake at its line. Imports nothing heavy."""

from orchestrator.spec.document import read_sweep_file
from orchestrator.spec.domains import Choice, Domain, Grid, Int, Uniform
from orchestrator.spec.faces import FieldFace, WorkloadFace, WorkloadOf
from orchestrator.spec.parse import cpu_asked, legal_name, parse_sweep
from orchestrator.spec.resolved import from_json, spec_difference, to_json
from orchestrator.spec.sweep_spec import SEED, Metric, Mode, Resources, Retries, Search, SweepSpec, Unstable

__all__ = [
    "SEED",
    "Choice",
    "Domain",
    "FieldFace",
    "Grid",
    "Int",
    "Metric",
    "Mode",
    "Resources",
    "Retries",
    "Search",
    "SweepSpec",
    "Uniform",
    "Unstable",
    "WorkloadFace",
    "WorkloadOf",
    "cpu_asked",
    "from_json",
    "legal_name",
    "parse_sweep",
    "read_sweep_file",
    "spec_difference",
    "to_json",
]
