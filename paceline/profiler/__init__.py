"""`paceline profile`: measures in a running stack how long its steps, and everything around them, take."""
