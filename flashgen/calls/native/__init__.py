"""Calls without Python, where `flashgen build-native` has been run: see docs/native.md."""
