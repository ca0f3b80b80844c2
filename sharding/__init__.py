"""Which bytes, in which order, for whom: formats, catalog, order, plan and writers. No torch, no threads."""
