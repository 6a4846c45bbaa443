"""Measurements of ckpt beside its peers, in one run: `scripts/bench`."""
