"""What died and why: suspects, turns that tell them apart, outages told to clients at once."""
