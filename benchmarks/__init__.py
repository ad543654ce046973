"""Measurements, one command each; the last line that a command prints is its result."""
