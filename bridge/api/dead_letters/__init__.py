"""Dead letters: list, look at one, put them back."""
