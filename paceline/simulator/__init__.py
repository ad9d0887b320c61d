"""A simulator of fleets: the real decisions of Paceline, with workers that only take time."""
