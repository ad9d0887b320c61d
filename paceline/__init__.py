"""Paceline: LLM serving with prefill and decode as separately scaled fleets."""

__version__ = "0.1.0"
