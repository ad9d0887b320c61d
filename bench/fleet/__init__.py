"""Fleets: the planner, the simulator, roll-outs, and stand-ins for workers."""
