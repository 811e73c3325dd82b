"""What a training is shown: fetched, ordered, changed, with the original's answers; and how much at a time."""
