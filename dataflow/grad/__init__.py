"""Gradient accumulation: windows, what ranks agree on, and how gradients travel."""
