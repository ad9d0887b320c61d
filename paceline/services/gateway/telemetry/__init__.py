"""Metrics of models and gateways, the book of the newest traces, and the figures of the console."""
