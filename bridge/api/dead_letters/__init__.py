"""The API's dead letters: list them, show one, redrive them."""
