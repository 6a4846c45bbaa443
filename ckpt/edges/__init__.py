"""What looks inside checkpoints and carries them away. One file an edge, each imported only when it is used."""
