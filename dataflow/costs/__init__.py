"""What training steps cost before they are run: reductions on a topology, step time, money, energy."""
