"""Holds published figures against the sweeps of this repository: `make science` writes docs/science.md."""
