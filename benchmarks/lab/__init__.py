"""Hosts on links of limited rate, and what they show; and what a batch passes on its way."""
