"""A sweep without training: the real searcher and scheduler on a simulated clock, over curves. Stores nothing."""

from orchestrator.simulation.clock import Simulated, SimulatedTrial, simulate
from orchestrator.simulation.curves import Curve, Curves
from orchestrator.simulation.landscape import Landscape
from orchestrator.simulation.recorded import Recorded

__all__ = ["Curve", "Curves", "Landscape", "Recorded", "Simulated", "SimulatedTrial", "simulate"]
