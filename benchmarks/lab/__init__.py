"""Instruments: the network lab, and what a batch passes on its way."""
