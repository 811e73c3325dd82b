"""Who may ask, and how much: keys, identity, rates, places, memory, and the path that is authorized."""
