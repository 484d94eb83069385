"""Checkers: bounds, races, the asynchronous proxy, registers of wgmma, and deadlocks."""
