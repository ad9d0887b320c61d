"""Where models come from: names, paths, the hub, Python packages, and conversions that are made once."""
