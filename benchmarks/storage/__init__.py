"""`dataflow bench storage` beside what a disk or a server can give at most."""
