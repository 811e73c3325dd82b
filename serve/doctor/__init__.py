"""What this machine has and lacks: said before anything is installed, and to paste into a report of a fault."""
