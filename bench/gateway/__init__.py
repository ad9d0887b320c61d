"""The gateway alone, and bodies and media that mean harm."""
