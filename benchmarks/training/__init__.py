"""What loaders, gradient schedules and strategies cost or gain a training."""
