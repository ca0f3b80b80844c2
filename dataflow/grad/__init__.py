"""`GradSchedule`: exact windows of microbatches over ranks that have unequal data.

In: model, optimizer, loader, weights. Out: one optimizer step a window, equal to one big batch.
Read `schedule` first, then `loop`, `step` and `negotiation` (who has how many), `boundary` (its end).
"""
