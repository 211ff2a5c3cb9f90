"""From a template and a config to text, and from text to a cubin. Needs no GPU."""
