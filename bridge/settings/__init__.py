"""What the operator wrote, and the client properties and time budgets that follow from it."""
