"""How weights change: optimizers, schedules, precision, averages; what is kept, and the way back."""
