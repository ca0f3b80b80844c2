"""What it costs to hand a batch from those who build it to the training process. Read `compare` first."""
