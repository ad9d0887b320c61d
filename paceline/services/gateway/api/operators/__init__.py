"""Routes for operators: health, metrics, the fleet, traces, scaling, and the reset of caches."""
