"""Is a kernel right? Inputs, references, verdicts."""
