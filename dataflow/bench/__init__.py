"""`dataflow bench`: what a store can do, what training gets of it, and how torch's own loader compares."""
