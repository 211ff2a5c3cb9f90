"""What callers import: attention on arrays, and why a call runs what it runs."""
