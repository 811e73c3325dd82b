"""More models than memory: a model is loaded when it is asked for, and the one that was used longest ago goes."""
