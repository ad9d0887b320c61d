"""Telemetry: metrics of models and gateways, traces of the newest requests, and the figures of the console."""
