"""What caches find of a context again, by policy and by routing."""
