"""Which tiles of a call the thread blocks visit, and what follows from their number."""
