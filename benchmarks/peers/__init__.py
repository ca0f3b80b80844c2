"""W1 to W4, the same bytes through each loader. `workloads` says who runs, `measured` what a process does."""
