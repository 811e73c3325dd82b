"""Exported programs (`.pt2`): their JSON read by an allow-list, and written again from what was understood."""
