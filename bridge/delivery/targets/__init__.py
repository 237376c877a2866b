"""The real topics: facts about them, breakers and pauses."""
