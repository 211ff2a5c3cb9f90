"""What to tune: models, Hugging Face configs, lists of problems."""
