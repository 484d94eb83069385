"""Tuning: the tiles of a pass ranked by predicted time, and measured where there is a GPU."""
