"""Models under release: which of two answers, what is learnt, when copies agree."""
