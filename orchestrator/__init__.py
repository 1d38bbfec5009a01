"""The control plane of orch: from a sweep file to rows one can query. Never imports torch."""

__version__ = "0.1.0"
