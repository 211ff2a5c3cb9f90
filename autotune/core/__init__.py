"""What a problem, a config, a GPU and a measurement are. Imports nothing of the rest."""
