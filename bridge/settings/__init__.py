"""The operator's settings, and the client properties and time budgets derived from them."""
