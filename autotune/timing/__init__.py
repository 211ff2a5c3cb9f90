"""How fast is it? Times, and the conditions that they hold under."""
