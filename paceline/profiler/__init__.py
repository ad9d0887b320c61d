"""`paceline profile`: learns from a running stack how long its steps and everything around them take."""
